"""Which rollout is sampled when: every one by exactly the policy that `max_staleness` says."""

from __future__ import annotations

from itertools import pairwise

import pytest

from posttrain.core.data.tokens import response_batch
from posttrain.pipelines.rl.rollouts import Rollout, rollouts_due


def versions(first: int, last: int, staleness: int, have: set[int]) -> dict[int, int]:
    """The policy version that samples each rollout, in a loop as `pipelines/rl/flow.py` has it."""
    found: dict[int, int] = {}
    for step in range(first, last + 1):
        for due in rollouts_due(step, first, last, staleness):
            if due not in have:
                assert due not in found, "no rollout is sampled twice"
                found[due] = step - 1  # the engine has the weights of the step before
    return found


@pytest.mark.parametrize("staleness", [0, 1, 2, 5])
def test_rollout_n_is_sampled_with_version_n_minus_1_minus_k(staleness: int) -> None:
    found = versions(1, 9, staleness, set())
    assert found == {n: max(0, n - 1 - staleness) for n in range(1, 10)}
    assert all(a < b for a, b in pairwise(found)), "in order"


@pytest.mark.parametrize("staleness", [0, 1, 2, 5])
@pytest.mark.parametrize("resumed_after", [1, 4, 8])
def test_a_resumed_run_samples_what_its_checkpoint_does_not_have_with_the_same_version(
    staleness: int, resumed_after: int
) -> None:
    whole = versions(1, 9, staleness, set())
    have = {n for n in whole if n <= resumed_after + staleness}
    rest = versions(resumed_after + 1, 9, staleness, have)
    assert rest == {n: version for n, version in whole.items() if n not in have}


def test_the_age_is_that_of_sampled_tokens_not_of_padding() -> None:
    """A response of eight tokens of version 4 next to one token of version 0, at step 5."""
    batch = response_batch(
        prompts=[[5], [5], [5]],
        responses=[[8] * 8, [8], []],
        group_ids=[0, 0, 0],
        pad_token_id=0,
        problems=(),
        policy_versions=[4, 0, 0],
    )
    assert Rollout(5, (), batch, {}).staleness() == {"staleness/mean": 4 / 9, "staleness/max": 4}
    empty = batch.with_columns(response_mask=batch.response_mask * 0)
    assert Rollout(5, (), empty, {}).staleness() == {}
