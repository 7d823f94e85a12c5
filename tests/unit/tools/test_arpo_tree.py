"""The sampler `"arpo_tree"`: trees of a tiny model, and a tree by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from posttrain.core.contracts import AdvantageEstimator, RolloutRequest, SampledGroup, Sampler
from posttrain.core.data.tokens import rollout_batch
from posttrain.core.errors import ConfigError
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.types import Completion, SamplingParams
from tests.helpers.advantages import outcome_batch
from tests.helpers.episodes import Tiny

MANAGER = PluginManager()
PARAMS = SamplingParams(num_generations=8, max_tokens=40, seed=11)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("tiny"))


def sampler(**fields: Any) -> Sampler[Any]:
    return MANAGER.build(Sampler, "arpo_tree", fields)


def grow(tiny: Tiny, params: SamplingParams = PARAMS, **fields: Any) -> Sequence[SampledGroup]:
    return sampler(**fields).sample(tiny.request(params)).groups


def shared(a: Completion, b: Completion) -> int:
    """Leading tokens of two leaves whose nodes are the same."""
    pairs = zip(a.node_ids, b.node_ids, strict=False)
    size = 0
    for mine, theirs in pairs:
        if mine != theirs:
            break
        size += 1
    return size


def test_copies_of_a_prefix_are_equal_and_nodes_are_shared_there_alone(tiny: Tiny) -> None:
    groups = grow(tiny, alpha=1.0)
    branched = 0
    for group in groups:
        for i, a in enumerate(group.completions):
            assert len(a.node_ids) == len(a.token_ids)
            for b in group.completions[i + 1 :]:
                size = shared(a, b)
                branched += size > 0
                assert a.token_ids[:size] == b.token_ids[:size]
                assert a.logprobs[:size] == b.logprobs[:size]
                assert a.entropies[:size] == b.entropies[:size]
                if size:
                    assert a.sampled[:size] == b.sampled[:size]
                    assert not a.sampled[size - 1], "a branch goes on from just after a result"
                assert not set(a.node_ids[size:]) & set(b.node_ids[size:])
    assert branched > 8


def test_branches_go_on_with_tokens_of_their_own(tiny: Tiny) -> None:
    for group in grow(tiny, alpha=1.0):
        endings = [c.token_ids for c in group.completions]
        assert len(set(endings)) >= len(endings) - 1


@pytest.mark.parametrize(
    "fields", [{"alpha": 1.0}, {"alpha": 1.0, "beam": 5, "initial": 1}, {"alpha": 0.0}]
)
@pytest.mark.parametrize("budget", [2, 5, 8])
def test_a_prompt_has_exactly_its_budget_of_leaves(
    tiny: Tiny, fields: dict[str, Any], budget: int
) -> None:
    groups = grow(tiny, replace(PARAMS, num_generations=budget), **fields)
    assert [len(group.completions) for group in groups] == [budget] * 4


def test_a_tree_with_no_room_to_branch_is_plain_sampling(tiny: Tiny) -> None:
    request = tiny.request(PARAMS)
    plain = request.generate(request.prompts, PARAMS)
    found = sampler(initial=8, alpha=1.0).sample(request)
    for mine, theirs in zip(found.groups, plain, strict=True):
        for a, b in zip(mine.completions, theirs.completions, strict=True):
            assert replace(a, node_ids=(), entropies=()) == b
    assert found.metrics["tree/branches"] == found.metrics["tree/shared_tokens_frac"] == 0


def test_trees_repeat_themselves_and_depend_on_the_seed(tiny: Tiny) -> None:
    assert grow(tiny) == grow(tiny)
    assert grow(tiny) != grow(tiny, replace(PARAMS, seed=12))


def test_a_sure_threshold_branches_always_and_an_impossible_one_never(tiny: Tiny) -> None:
    def branches(**fields: Any) -> float:
        request = tiny.request(PARAMS)
        found = sampler(branch_mode="threshold", **fields).sample(request).metrics
        assert found["tree/leaves"] == 8
        return found["tree/branches"]

    always, never = branches(tau=0.0, beta=0.0), branches(tau=1.0, beta=0.0)
    assert always >= 3 and never == 0
    # By default it branches exactly where the entropy rose: sometimes, but not everywhere.
    assert 0 < branches() < always
    assert branches(beta=0.0) != branches()


def level(leaf: Completion, start: int) -> float:
    """Mean entropy of the first three tokens of the turn that begins at `start`."""
    end = start
    while end < len(leaf.token_ids) and end < start + 3 and (not leaf.sampled or leaf.sampled[end]):
        end += 1
    return sum(leaf.entropies[start:end]) / (end - start)


def test_the_entropy_of_the_first_tokens_after_a_result_decides(tiny: Tiny) -> None:
    """Threshold mode with beta 1 and alpha tau: a branch exists where dH > 0, and only there."""
    params = replace(PARAMS, num_generations=24)
    groups = grow(tiny, params, branch_mode="threshold", initial=4, entropy_tokens=3)
    seen = {True: 0, False: 0}
    for group in groups:
        for leaf in group.completions[:4]:
            starts, own = [], leaf.sampled or (True,) * len(leaf.token_ids)
            for index in range(len(own)):
                if own[index] and (index == 0 or not own[index - 1]):
                    starts.append(index)
            for start in starts[1:]:
                others = [c for c in group.completions if c is not leaf]
                parted = any(shared(leaf, other) == start for other in others)
                assert parted == (level(leaf, start) > level(leaf, starts[0]))
                seen[parted] += 1
    assert min(seen.values()) >= 2


def test_a_tree_without_branches_is_topped_up_from_the_prompt(tiny: Tiny) -> None:
    found = sampler(alpha=0.0, beta=0.0, initial=3).sample(tiny.request(PARAMS))
    assert found.metrics["tree/branches"] == 0
    assert found.metrics["tree/topped_up"] == 5
    for group in found.groups:
        assert len({c.token_ids for c in group.completions}) == 8


def test_the_shared_fraction_counts_sampled_copies(tiny: Tiny) -> None:
    found = sampler(alpha=1.0).sample(tiny.request(PARAMS))
    total, distinct = 0, 0
    for group in found.groups:
        nodes: set[tuple[int, int]] = set()
        for c in group.completions:
            columns = [
                (node, column)
                for column, (node, own) in enumerate(
                    zip(c.node_ids, c.sampled or (True,) * len(c.token_ids), strict=True)
                )
                if own
            ]
            total += len(columns)
            nodes |= set(columns)
        distinct += len(nodes)
    assert found.metrics["tree/shared_tokens_frac"] == pytest.approx(1 - distinct / total)
    assert found.metrics["tree/shared_tokens_frac"] > 0.02


def test_without_an_environment_it_says_what_to_change(tiny: Tiny) -> None:
    request: RolloutRequest = replace(tiny.request(PARAMS), episodes=None)
    with pytest.raises(ConfigError, match="add `environment`"):
        sampler().sample(request)
    assert "initial: 9" in sampler(initial=9).refuses(8)
    assert sampler(initial=8).refuses(8) == sampler().refuses(1) == ""


# --- what the advantages make of a tree ----------------------------------------------------------


def test_attribution_on_a_tree_by_hand() -> None:
    """Two leaves share two tokens and an observation; a third stands alone. A = R - mean."""
    node = torch.tensor([[0, 0, 1, 2, -1], [0, 0, 1, 3, 3], [4, 4, 4, -1, -1]])
    seen = torch.tensor([[1, 1, 0, 1, 0], [1, 1, 0, 1, 1], [1, 1, 1, 0, 0]])
    batch = outcome_batch([1.0, 0.0, 0.5], lengths=[4, 5, 3], node_id=node)
    batch = batch.with_columns(
        response_mask=seen, mask=seen, token_rewards=batch.column("token_rewards") * seen
    )

    def estimate(**fields: Any) -> list[list[float]]:
        estimator = MANAGER.build(AdvantageEstimator, "dr_grpo", fields)
        return estimator.estimate(batch).advantages.tolist()

    assert estimate() == [[0.5, 0.5, 0, 0.5, 0], [-0.5, -0.5, 0, -0.5, -0.5], [0, 0, 0, 0, 0]]
    assert estimate(attribution="hard") == [
        [0, 0, 0, 0.5, 0],
        [0, 0, 0, -0.5, -0.5],
        [0, 0, 0, 0, 0],
    ]
    assert estimate(dedup_prefix=True) == [
        [0.25, 0.25, 0, 0.5, 0],
        [-0.25, -0.25, 0, -0.5, -0.5],
        [0, 0, 0, 0, 0],
    ]


def test_hard_attribution_on_a_grown_tree_is_the_mean_over_the_leaves_below(tiny: Tiny) -> None:
    groups = grow(tiny, alpha=1.0)
    batch = rollout_batch(groups, tiny.tokenizer)
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(len(batch), generator=generator)
    from posttrain.core.rewards.shaping import place_on_last_token

    batch = batch.with_columns(
        rewards=rewards,
        scored=torch.ones(len(batch), dtype=torch.bool),
        token_rewards=place_on_last_token(rewards, batch.response_mask),
    )
    soft = MANAGER.build(AdvantageEstimator, "grpo", {}).estimate(batch).advantages
    hard = MANAGER.build(AdvantageEstimator, "grpo", {"attribution": "hard"}).estimate(batch)
    leaves = [c for group in groups for c in group.completions]
    checked = 0
    for row, leaf in enumerate(leaves):
        own = leaf.sampled or (True,) * len(leaf.token_ids)
        for column in range(len(leaf.token_ids)):
            below = [
                other
                for other in range(len(leaves))
                if batch.group_id[other] == batch.group_id[row]
                and shared(leaf, leaves[other]) > column
            ]
            expected = float(soft[below, 0].mean()) if own[column] else 0.0
            assert float(hard.advantages[row, column]) == pytest.approx(expected, abs=1e-5)
            checked += len(below) > 1
    assert checked > 20
