"""What is learned from of an episode's calls: one response for each leaf of their tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from posttrain.core.gateway.tree import NOBODY, TokenTree
from posttrain.core.rollout.turns import state_key
from posttrain.core.types import Completion


@dataclass(frozen=True, slots=True)
class SampledCall:
    """A call that was answered: the tree's nodes at the end of its prompt and of its answer."""

    number: int
    start: int
    end: int
    sampled: Completion
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class Ending:
    """How the episode ended, for each of its responses alike."""

    reward: float | None = None
    failed: str = ""
    counts: Mapping[str, float] = field(default_factory=dict)


def responses_of(
    tree: TokenTree, calls: Sequence[SampledCall], ending: Ending, *, with_discarded: bool
) -> list[Completion]:
    """The branches, the one with the last call first; each token is learned from in one of them.

    A response begins with the first token that was sampled on its way; what is before is its
    prompt. Without `with_discarded`, a call is left out that led nowhere while another one with the
    same prompt went on.
    """
    leaves: dict[int, int] = {}  # node -> its last call
    shown = {node for call in calls for node in tree.path(call.start)}
    went_on = {call.start for call in calls if call.end in shown}
    for call in calls:
        if tree.is_leaf(call.end) and (with_discarded or call.start not in went_on):
            leaves[call.end] = call.number
    taken: set[int] = set()
    rows = []
    for leaf in sorted(leaves, key=lambda node: -leaves[node]):
        row = _response(tree, tree.path(leaf), calls, ending, taken)
        if row is not None:
            rows.append(row)
    return rows


def _response(
    tree: TokenTree,
    path: Sequence[int],
    calls: Sequence[SampledCall],
    ending: Ending,
    taken: set[int],
) -> Completion | None:
    first = next(i for i, node in enumerate(path) if tree.by[node] != NOBODY)
    own = path[first:]
    sampled = [tree.by[node] != NOBODY for node in own]
    elsewhere = [node in taken for node in own]
    new = [node for node in own if tree.by[node] != NOBODY and node not in taken]
    if not new:
        return None  # others have all of it
    taken.update(own)
    place = {node: index for index, node in enumerate(path)}
    rewards: dict[int, float] = {}  # of calls with the same answer, which are one turn, the sum
    for call in calls:
        if call.reward is not None and call.end in place:
            rewards[place[call.end]] = rewards.get(place[call.end], 0.0) + call.reward
    turns = sorted(
        {place[call.end]: call for call in calls if call.end in place}.items(), key=lambda t: t[0]
    )
    keys, shown_from = [], 0
    for end, call in turns:
        begin = place.get(call.start, -1) + 1
        keys.append(state_key([tree.token[node] for node in path[shown_from:begin]]))
        shown_from = end + 1
    versions: list[int] = []
    for node in own:
        known = tree.version[node]
        versions.append(known if known >= 0 or not versions else versions[-1])
    last = turns[-1][1].sampled
    return Completion(
        token_ids=tuple(tree.token[node] for node in own),
        logprobs=tuple(tree.logprob[node] for node in own),
        finish_reason=last.finish_reason,
        policy_version=versions[0],
        seed=last.seed,
        engine=last.engine,
        engine_version=last.engine_version,
        sampled=() if all(sampled) else tuple(sampled),
        elsewhere=tuple(elsewhere) if any(elsewhere) else (),
        counts=dict(ending.counts),
        turn_ends=tuple(end - first for end, _ in turns),
        turn_rewards=tuple(rewards.get(end) for end, _ in turns),
        state_keys=tuple(keys),
        reward=ending.reward,
        failed=ending.failed,
        prompt_ids=tuple(tree.token[node] for node in path[:first]),
        versions=tuple(versions) if len(set(versions)) > 1 else (),
    )
