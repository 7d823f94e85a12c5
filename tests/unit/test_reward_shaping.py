"""Overlong filtering and whitening: what they take out, and that running moments are exact."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.batch import RolloutBatch
from posttrain.core.data.tokens import ChatTokenizer, response_batch
from posttrain.core.kit.tiny import make_tiny_tokenizer
from posttrain.core.math.groups import outcome_rewards
from posttrain.core.math.shaping import RunningMoments
from posttrain.core.rewards.shaping import (
    RewardShaping,
    fill_steps,
    filter_overlong,
    place_on_last_token,
)
from posttrain.core.training.groups import drop_groups
from posttrain.core.types import Problem, Score, StepVerdict


def scored_batch(rewards: list[float], truncated: list[bool], scored: list[bool]) -> RolloutBatch:
    size = len(rewards)
    batch = response_batch(
        prompts=[[5]] * size,
        responses=[[8] * (row + 1) for row in range(size)],
        group_ids=[0] * size,
        pad_token_id=0,
        problems=[Problem("", "", "", "")] * size,
    )
    values, valid = torch.tensor(rewards), torch.tensor(scored)
    return batch.with_columns(
        rewards=values,
        scored=valid,
        acc=(values > 0).float(),
        mask=batch.mask * valid[:, None],
        truncated=torch.tensor(truncated),
        token_rewards=place_on_last_token(values, batch.response_mask),
    )


@pytest.mark.parametrize(("rule", "in_statistics"), [("mask", True), ("exclude", False)])
def test_a_truncated_response_takes_no_loss_and_stays_in_its_group_as_told(
    rule: str, in_statistics: bool
) -> None:
    batch = scored_batch([1.0, 0.0, 1.0], [False, True, False], [True, True, True])
    found, metrics = filter_overlong(batch, rule)  # type: ignore[arg-type]
    assert found.mask.sum(dim=1).tolist() == [1, 0, 3]
    assert found.column("scored").tolist() == [True, in_statistics, True]
    assert outcome_rewards(found).tolist() == [1.0, 0.0, 1.0]
    assert metrics == {"reward/overlong_filtered_frac": pytest.approx(1 / 3)}
    assert filter_overlong(batch, "none")[0] is batch


@pytest.mark.parametrize(("rule", "in_statistics"), [("mask", True), ("exclude", False)])
def test_of_an_episode_all_branches_are_left_out_where_its_last_call_was_cut(
    rule: str, in_statistics: bool
) -> None:
    """The second episode's last call is in its first row; the third had a call cut before that."""
    truncated = [False, True, False, False, True]
    batch = scored_batch([1.0] * 5, truncated, [True] * 5)
    batch = batch.with_columns(episode_id=torch.tensor([0, 1, 1, 2, 2]))
    found, metrics = filter_overlong(batch, rule)  # type: ignore[arg-type]
    assert found.mask.sum(dim=1).tolist() == [1, 0, 0, 4, 5]
    kept = in_statistics
    assert found.column("scored").tolist() == [True, kept, kept, True, True]
    assert metrics == {"reward/overlong_filtered_frac": pytest.approx(1 / 3)}


def test_steps_of_a_branch_that_begins_inside_a_turn() -> None:
    """After an observation the branches share "ab\\nc": the step "ab\\n" is the first one's."""
    tokenizer = ChatTokenizer(make_tiny_tokenizer(), None)
    texts = ["ab\ncd\n", "ab\ncx\ny\n"]
    before, alone = tokenizer.encode_text("look", special=True), len("looked")
    responses = [(*before, *tokenizer.encode_text(f"ed{text}", special=True)) for text in texts]
    sampled = [[True] * 4 + [False] * 2 + [True] * len(text) for text in texts]
    shared = [False] * len(responses[0]), [True] * 10 + [False] * (len(responses[1]) - 10)
    batch = response_batch(
        prompts=[[5]] * 2,
        responses=responses,
        group_ids=[0, 0],
        pad_token_id=0,
        problems=[Problem("", "", "", "")] * 2,
        texts=texts,
        sampled=sampled,
        elsewhere=shared,
    ).with_columns(episode_id=torch.tensor([0, 0]))
    steps = [[3, 6], [3, 6, 8]]
    scores = [Score(1.0, steps=tuple(StepVerdict(end, 0.5) for end in own)) for own in steps]
    found = fill_steps(batch, scores, tokenizer)
    wanted = [[alone + 2, alone + 5, -1], [-1, alone + 5, alone + 7]]
    assert found.column("step_end").tolist() == wanted
    assert found.column("step_score").tolist() == [[0.5, 0.5, 0.0], [0.0, 0.5, 0.5]]


def test_whitening_the_batch_looks_at_scored_rows_only() -> None:
    batch = scored_batch([1.0, 3.0, 50.0, 5.0], [False] * 4, [True, True, False, True])
    found, metrics = RewardShaping(whitening="batch").apply(batch)
    assert outcome_rewards(found).tolist() == [-1.0, 0.0, 0.0, 1.0]  # mean 3, deviation 2
    assert metrics == {"reward/whiten_std": pytest.approx(2.0)}
    kept, _ = RewardShaping(whitening="batch", keep_mean=True).apply(batch)
    assert outcome_rewards(kept).tolist() == [2.0, 3.0, 0.0, 4.0]


def test_whitening_counts_an_episode_once_however_many_branches_it_has() -> None:
    batch = scored_batch([1.0, 3.0, 5.0, 5.0, 5.0], [False] * 5, [True] * 5)
    batch = batch.with_columns(episode_id=torch.tensor([0, 1, 2, 2, 2]))
    centred, _ = RewardShaping(whitening="batch").apply(batch)
    assert outcome_rewards(centred).tolist() == [-1.0, 0.0, 1.0, 1.0, 1.0]
    scaled, _ = RewardShaping(whitening="running").apply(batch)
    assert outcome_rewards(scaled).tolist() == [0.5, 1.5, 2.5, 2.5, 2.5]


def test_whitening_comes_after_the_overlong_filter() -> None:
    batch = scored_batch([1.0, 3.0, 50.0, 5.0], [False, False, True, False], [True] * 4)
    out = RewardShaping("exclude", "batch").apply(batch)[0]
    assert outcome_rewards(out).tolist() == [-1.0, 0.0, 0.0, 1.0]
    inside = RewardShaping("mask", "batch").apply(batch)[0]
    assert outcome_rewards(inside)[2] > 1.4 and inside.mask[2].sum() == 0


def test_filters_of_groups_see_the_rewards_before_whitening() -> None:
    batch = scored_batch([0.5, 0.5 + 5e-7], [False] * 2, [True, True])
    found, _ = RewardShaping(whitening="batch").apply(batch)
    assert found.column("rewards").tolist() == batch.column("rewards").tolist()
    assert drop_groups(found, "zero_advantage")[1] == {"group/dropped_frac": 1.0}


@pytest.mark.parametrize("rewards", [[0.25], [0.25, 0.25, 0.25], []])
def test_one_reward_equal_ones_or_none_divide_by_nothing(rewards: list[float]) -> None:
    size = len(rewards) + 1
    batch = scored_batch([*rewards, 9.0], [False] * size, [True] * (size - 1) + [False])
    centred, _ = RewardShaping(whitening="batch").apply(batch)
    assert outcome_rewards(centred).tolist() == [0.0] * len(batch)
    running, _ = RewardShaping(whitening="running").apply(batch)
    assert outcome_rewards(running).tolist() == [*rewards, 0.0]


def test_the_running_deviation_is_that_of_all_rewards_and_survives_a_checkpoint() -> None:
    first = scored_batch([1.0, 3.0], [False] * 2, [True] * 2)
    second = scored_batch([5.0, 9.0, 100.0], [False] * 3, [True, True, False])
    whole = RewardShaping(whitening="running")
    whole.apply(first)
    resumed = RewardShaping(whitening="running")
    resumed.load_state(json.loads(json.dumps(whole.state())))
    deviation = torch.tensor([1.0, 3.0, 5.0, 9.0]).double().std()
    for shaping in (whole, resumed):
        found, _ = shaping.apply(second)
        expected = torch.tensor([5.0, 9.0, 0.0]).double() / deviation
        torch.testing.assert_close(outcome_rewards(found), expected, rtol=1e-6, atol=1e-6)
    assert RewardShaping(whitening="batch").state() == {}


def test_a_greedy_baseline_is_put_on_the_same_scale() -> None:
    batch = scored_batch([1.0, 3.0, 5.0], [False] * 3, [True] * 3)
    shaping = RewardShaping(whitening="batch")
    found, _ = shaping.apply(batch)
    again = shaping.rescaled(batch.column("rewards"))
    torch.testing.assert_close(again, outcome_rewards(found))
    assert shaping.rescaled(torch.tensor([torch.nan])).isnan().all()


@given(st.lists(st.lists(st.floats(-1e3, 1e3), max_size=6), min_size=1, max_size=6))
def test_running_moments_equal_those_of_all_values_at_once(parts: list[list[float]]) -> None:
    moments = RunningMoments()
    for part in parts:
        moments.update(torch.tensor(part, dtype=torch.float64))
    values = torch.tensor([v for part in parts for v in part], dtype=torch.float64)
    assert moments.count == len(values)
    if len(values) > 1:
        assert moments.mean == pytest.approx(float(values.mean()), abs=1e-9)
        assert moments.std() == pytest.approx(float(values.std()), rel=1e-9, abs=1e-9)
