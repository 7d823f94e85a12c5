"""The token tree of an episode against a plain set of prefixes."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.gateway.rows import Ending, SampledCall, responses_of
from posttrain.core.gateway.tree import NOBODY, TokenTree
from posttrain.core.types import Completion

TOKENS = st.lists(st.integers(0, 2), max_size=6)
CALLS = st.lists(st.tuples(TOKENS, st.lists(st.integers(0, 2), min_size=1, max_size=4)), max_size=9)


def grown(calls: list[tuple[list[int], list[int]]]) -> tuple[TokenTree, list[SampledCall]]:
    tree, made = TokenTree(), []
    for number, (prompt, own) in enumerate(calls):
        logprobs = tuple(-float(number) - i / 16 for i in range(len(own)))
        sampled = Completion(tuple(own), logprobs, "stop", number, 0, "", "")
        made.append(SampledCall(number, *tree.add(number, prompt, sampled), sampled))
    return tree, made


@given(CALLS)
@settings(deadline=None, max_examples=300)
def test_the_tree_holds_each_prefix_once_with_who_sampled_it_first(
    calls: list[tuple[list[int], list[int]]],
) -> None:
    tree, made = grown(calls)
    prefixes, owners, repeats = set(), {}, 0
    for number, (prompt, own) in enumerate(calls):
        whole = (*prompt, *own)
        prefixes |= {whole[: n + 1] for n in range(len(whole))}
        for n in range(len(prompt), len(whole)):
            repeats += whole[: n + 1] in owners
            owners.setdefault(whole[: n + 1], (number, -float(number) - (n - len(prompt)) / 16))
    nodes = {tree.tokens(node): node for node in range(1, len(tree) + 1)}
    assert set(nodes) == prefixes and len(nodes) == len(tree)
    assert tree.repeats == repeats
    for prefix, node in nodes.items():
        by, logprob = owners.get(prefix, (NOBODY, 0.0))
        assert (tree.by[node], tree.logprob[node]) == (by, logprob)
        longer = any(other[:-1] == prefix for other in prefixes)
        assert tree.is_leaf(node) is not longer
    for call, (prompt, own) in zip(made, calls, strict=True):
        assert tree.tokens(call.start) == tuple(prompt)
        assert tree.tokens(call.end) == (*prompt, *own)


@given(CALLS)
@settings(deadline=None, max_examples=300)
def test_rows_learn_from_each_sampled_token_once(
    calls: list[tuple[list[int], list[int]]],
) -> None:
    tree, made = grown(calls)
    rows = responses_of(tree, made, Ending(), with_discarded=True)
    learned, shown = [], []
    for row in rows:
        whole = (*row.prompt_ids, *row.token_ids)
        sampled = row.sampled or (True,) * len(row.token_ids)
        elsewhere = row.elsewhere or (False,) * len(row.token_ids)
        assert sampled[0]  # the prompt reaches to the first sampled token
        first = len(row.prompt_ids)
        own = [n for n, (s, e) in enumerate(zip(sampled, elsewhere, strict=True)) if s and not e]
        assert own  # no row without a token of its own
        learned += [(whole[: first + n + 1], row.logprobs[n]) for n in own]
        others = zip(sampled, elsewhere, strict=True)
        shown += [whole[: first + n + 1] for n, (s, e) in enumerate(others) if not s and not e]
        assert all(value == 0 for value, s in zip(row.logprobs, sampled, strict=True) if not s)
    owned = {
        (tree.tokens(node), tree.logprob[node])
        for node in range(1, len(tree) + 1)
        if tree.by[node] != NOBODY
    }
    assert len(learned) == len(owned) and set(learned) == owned
    assert len(shown) == len(set(shown))  # `echo` learns what others wrote once as well
    if rows:
        last = max(call.number for call in made if tree.is_leaf(call.end))
        assert (*rows[0].prompt_ids, *rows[0].token_ids) == (*calls[last][0], *calls[last][1])


def test_calls_with_the_same_answer_are_one_turn_with_the_sum_of_their_rewards() -> None:
    tree, made = grown([([1], [2]), ([1], [2]), ([1], [2]), ([1, 2, 0], [1])])
    posted = [0.25, None, 0.5, None]
    calls = [replace(call, reward=reward) for call, reward in zip(made, posted, strict=True)]
    (row,) = responses_of(tree, calls, Ending(), with_discarded=True)
    assert (row.turn_ends, row.turn_rewards) == ((0, 2), (0.75, None))


def test_an_answer_that_goes_on_where_another_was_cut_is_not_discarded() -> None:
    """The program asked again with more room, and the policy said the same and more."""
    tree, made = grown([([1, 2], [0, 1]), ([1, 2], [0, 1, 2, 2])])
    (row,) = responses_of(tree, made, Ending(), with_discarded=False)
    assert row.token_ids == (0, 1, 2, 2)
