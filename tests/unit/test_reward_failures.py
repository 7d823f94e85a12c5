"""A failed sample has a status, not a zero: sums, counts, the table, and the stop of the run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import NoConfig, Reward, Task
from posttrain.core.data.tokens import response_batch
from posttrain.core.errors import RunError
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.rewards.checking import check_failure_rate
from posttrain.core.rewards.pool import RewardPool
from posttrain.core.rewards.scoring import OnMissing, rollout_metrics, score_batch
from posttrain.core.rewards.weighted import WeightedReward
from posttrain.core.tracking.metric_names import check_names
from posttrain.core.tracking.tables import sample_rows
from posttrain.core.types import TASK, RewardSample, Score
from tests.helpers.faulty_rewards import FaultyConfig, FaultyReward
from tests.helpers.plugins import MANAGER


class Given(Reward[NoConfig]):
    """R = what the test says."""

    name, Config, runs_in = "given", NoConfig, "host"

    def __init__(self, scores: Sequence[Score]) -> None:
        super().__init__(NoConfig())
        self.scores = list(scores)

    def score(self, samples: Sequence[RewardSample]) -> list[Score]:
        return self.scores


class LengthTerm(Given):
    """The same as a term that is added after the clip."""

    after_clip = True


@pytest.fixture
def task(manager: PluginManager) -> Task[NoConfig]:
    return manager.build(Task, "arithmetic")


def batch_of(task: Task[NoConfig], texts: Sequence[str]) -> RolloutBatch:
    problems = task.problems("train", len(texts), 0)
    return response_batch(
        prompts=[[5, 6, 7]] * len(texts),
        responses=[[8, 9]] * len(texts),
        group_ids=[0] * len(texts),
        pad_token_id=0,
        problems=problems,
        texts=list(texts),
    )


OK = Score(1.0)
NOTHING_TO_SAY = Score(None, "unscored", "no call in it")
LATE = Score(None, "timeout", "no score within 10 s")
DEAD = Score(None, "crashed", "its process was killed by SIGSEGV")
RAISED = Score(None, "error", "ValueError: no")


@pytest.mark.parametrize(("on_missing", "kept"), [("zero", True), ("unscored", False)])
def test_a_component_without_a_say_counts_nothing_or_leaves_the_row_unscored_as_told(
    task: Task[NoConfig], on_missing: OnMissing, kept: bool
) -> None:
    rewards = [
        WeightedReward(Given([OK, OK]), 2.0),
        WeightedReward(Given([OK, NOTHING_TO_SAY]), 0.5),
    ]
    scored = score_batch(batch_of(task, "ab"), task, rewards, on_missing=on_missing)
    assert scored.column("scored").tolist() == [True, kept]
    assert scored.column("rewards").tolist() == [2.5, 2.0 if kept else 0.0]


@pytest.mark.parametrize("failure", [LATE, DEAD, RAISED], ids=lambda score: score.status)
def test_a_component_that_failed_leaves_its_row_out_whatever_the_others_say(
    task: Task[NoConfig], failure: Score
) -> None:
    rewards = [
        WeightedReward(Given([OK, OK, OK]), 1.0),
        WeightedReward(Given([OK, failure, NOTHING_TO_SAY]), 1.0),
    ]
    scored = score_batch(batch_of(task, "abc"), task, rewards, on_missing="zero")
    assert scored.column("scored").tolist() == [True, False, True]
    assert scored.column("rewards").tolist() == [2.0, 0.0, 1.0]
    assert scored.mask.sum(dim=1).tolist() == [2, 0, 2]
    assert math.isnan(scored.column("reward_components")[1, 1])


def test_nonsense_from_a_reward_in_this_process_is_an_error_too(task: Task[NoConfig]) -> None:
    given = Given([Score(math.nan), Score("1"), Score(True), 0.5])  # type: ignore[list-item, arg-type]
    scored = score_batch(batch_of(task, "abcd"), task, [WeightedReward(given, 1.0)])
    assert [row[0].status for row in scored.scores] == ["error", "error", "ok", "error"]
    assert scored.column("rewards").tolist() == [0.0, 0.0, 1.0, 0.0]


def test_terms_on_length_come_after_the_clip(task: Task[NoConfig]) -> None:
    rewards = [
        WeightedReward(Given([Score(3.0), Score(-3.0)]), 1.0),
        WeightedReward(LengthTerm([Score(-0.5), Score(-0.5)]), 2.0),
    ]
    scored = score_batch(batch_of(task, "ab"), task, rewards, clip=(-1.0, 1.0))
    assert scored.column("rewards").tolist() == [0.0, -2.0]


def test_failures_are_counted_by_status_and_by_reward(task: Task[NoConfig]) -> None:
    rewards = [
        WeightedReward(Given([OK, LATE, LATE, DEAD]), 1.0),
        WeightedReward(Given([NOTHING_TO_SAY, OK, RAISED, OK]), 1.0),
    ]
    scored = score_batch(batch_of(task, "abcd"), task, rewards)
    metrics = rollout_metrics(scored, ["first", "second"])
    check_names(metrics)
    counts = ["reward/failures", "reward/timeouts", "reward/crashes", "reward/errors"]
    assert [metrics[name] for name in counts] == [4.0, 2.0, 1.0, 1.0]
    assert metrics["reward/failed_frac/first"] == 0.75
    assert metrics["reward/failed_frac/second"] == 0.25
    assert metrics["reward/unscored_frac"] == 0.75


def test_the_table_shows_what_happened_to_each_row(task: Task[NoConfig]) -> None:
    rewards = [
        WeightedReward(Given([Score(1.0, detail="read 7"), LATE]), 1.0),
        WeightedReward(Given([OK, NOTHING_TO_SAY]), 1.0),
    ]
    scored = score_batch(batch_of(task, "ab"), task, rewards)
    first, second = sample_rows(scored, ["first", "second"])
    assert (first["reward_status"], first["reward_detail"]) == ("ok", "first: read 7")
    assert second["reward_status"] == "first: timeout; second: unscored"
    assert second["reward_detail"] == "first: no score within 10 s; second: no call in it"
    assert second["reward"] is None and second["reward/first"] is None


def test_scores_follow_their_rows(task: Task[NoConfig]) -> None:
    scored = score_batch(batch_of(task, "ab"), task, [WeightedReward(Given([OK, LATE]), 1.0)])
    assert scored.select(torch.tensor([1, 1])).scores == ((LATE,), (LATE,))


def test_too_many_failures_stop_the_run_with_the_first_three(task: Task[NoConfig]) -> None:
    column = [OK] * 5 + [DEAD, RAISED, NOTHING_TO_SAY, LATE, LATE]
    batch = batch_of(task, "abcdefghij")
    scored = score_batch(batch, task, [WeightedReward(Given(column), 1.0)])
    check_failure_rate(scored, ["given"], 0.4)  # four of ten; what is unscored has not failed
    with pytest.raises(RunError) as error:
        check_failure_rate(scored, ["given"], 0.3)
    lines = str(error.value).splitlines()
    assert "4 of 10 responses (40%)" in lines[0] and "max_failure_rate (30%)" in lines[0]
    prompts = [problem.prompt for problem in batch.problems]
    assert lines[1:4] == [
        f"  1. reward 'given': crashed: {DEAD.detail}; prompt {prompts[5]!r}",
        f"  2. reward 'given': error: {RAISED.detail}; prompt {prompts[6]!r}",
        f"  3. reward 'given': timeout: {LATE.detail}; prompt {prompts[8]!r}",
    ]
    assert "reward_pool.timeout_s" in lines[4]


def test_rewards_of_a_pool_and_of_this_process_fill_one_batch(task: Task[NoConfig]) -> None:
    pooled, host = FaultyReward(FaultyConfig()), Given([OK, OK, OK])
    rewards = [WeightedReward(host, 1.0), WeightedReward(pooled, 10.0)]
    with RewardPool([pooled], workers=1) as pool:
        scored = score_batch(batch_of(task, ["2", "exit", "3"]), task, rewards, pool=pool)
    assert scored.column("rewards").tolist() == [21.0, 0.0, 31.0]
    assert [row[1].status for row in scored.scores] == ["ok", "crashed", "ok"]


def test_what_a_pool_says_of_other_tasks_is_no_failure(task: Task[NoConfig]) -> None:
    batch = batch_of(task, ["2", "exit", "3"])
    problems = [replace(p, metadata={TASK: t}) for p, t in zip(batch.problems, "aba", strict=True)]
    faulty: Reward[Any] = FaultyReward(FaultyConfig())
    form = MANAGER.build(Reward, "format", {"pattern": "exit"})  # type: ignore[type-abstract]
    rewards = [
        WeightedReward(faulty, 1.0, tasks=("a",)),
        WeightedReward(form, 1.0, tasks=("b",)),
    ]
    with RewardPool([faulty, form], workers=1) as pool:
        scored = score_batch(replace(batch, problems=tuple(problems)), task, rewards, pool=pool)
    assert scored.column("rewards").tolist() == [2.0, 1.0, 3.0]
    assert scored.column("scored").tolist() == [True, True, True]
