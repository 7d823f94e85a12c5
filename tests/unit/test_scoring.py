"""Rewards onto rows and tokens: what cannot be scored is never a zero."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from posttrain.core.batch import RolloutBatch
from posttrain.core.config.rl_stage import RewardComponent
from posttrain.core.contracts import (
    KlEstimator,
    NoConfig,
    PromptGroup,
    Reward,
    SampledGroup,
    Task,
)
from posttrain.core.data.tokens import (
    ChatTokenizer,
    response_batch,
    reward_sample,
    rollout_batch,
)
from posttrain.core.errors import RunError
from posttrain.core.kit.tiny import make_tiny_tokenizer
from posttrain.core.math.groups import z_scores
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.rewards.scoring import (
    OnMissing,
    Scorer,
    duplicate_frac,
    gated,
    reward_samples,
    rollout_metrics,
    score_batch,
)
from posttrain.core.rewards.shaping import place_on_last_token, subtract_kl
from posttrain.core.rewards.weighted import WeightedReward, weighted_rewards
from posttrain.core.tracking.tables import sample_rows
from posttrain.core.training import reward_model
from posttrain.core.types import TASK, Completion, RewardSample, Score, Verdict
from posttrain.plugins.rewards.reward_model import RewardModelConfig, RewardModelReward


class Given(Reward[NoConfig]):
    """R = what the test says."""

    name, Config = "given", NoConfig

    def __init__(self, values: list[float | None]) -> None:
        super().__init__(NoConfig())
        self.values = values

    def score(self, samples: Sequence[RewardSample]) -> list[Score]:
        return [Score(v) for v in self.values]


@pytest.fixture
def task(manager: PluginManager) -> Task[NoConfig]:
    return manager.build(Task, "arithmetic")


def batch_of(task: Task[NoConfig], texts: list[str]):  # type: ignore[no-untyped-def]
    problem = task.problems("train", 1, 0)[0]
    return response_batch(
        prompts=[[5, 6, 7]] * len(texts),
        responses=[[8] * (i + 1) for i in range(len(texts))],
        group_ids=[0] * len(texts),
        pad_token_id=0,
        problems=[problem] * len(texts),
        texts=[problem.answer if text == "right" else text for text in texts],
    )


def test_the_reward_is_the_weighted_sum_and_sits_on_the_last_sampled_token(
    task: Task[NoConfig],
) -> None:
    batch = batch_of(task, ["right", "wrong"])
    rewards = [WeightedReward(Given([1.0, 0.5]), 2.0), WeightedReward(Given([0.0, 1.0]), -1.0)]
    scored = score_batch(batch, task, rewards)
    assert scored.column("rewards").tolist() == [2.0, 0.0]
    assert scored.column("acc").tolist() == [1.0, 0.0]
    assert scored.column("token_rewards").tolist() == [[2.0, 0.0], [0.0, 0.0]]


def test_a_process_reward_counts_for_right_answers_alone(task: Task[NoConfig]) -> None:
    """R = R_fmt + R_out + 1[R_out = 1] R_proc, and what the sum without a gate would teach."""
    batch = batch_of(task, ["a", "b", "c", "d"])
    form, outcome = Given([1.0] * 4), Given([1.0, 1.0, 0.0, 0.0])
    process = Given([0.9, 0.5, 0.8, 0.2])

    def advantages(gate: str | None) -> tuple[list[float], list[float]]:
        rewards = [
            WeightedReward(process, 1.0, "steps", gate),
            WeightedReward(form, 1.0, "form"),
            WeightedReward(outcome, 1.0, "right"),
        ]
        scored = score_batch(batch, task, rewards)
        assert [row[0].value for row in scored.scores] == [0.9, 0.5, 0.8, 0.2]
        values = scored.column("rewards").double()
        return values.tolist(), z_scores(values, 1, 1e-6).tolist()

    rewards, z = advantages("right")
    assert rewards == pytest.approx([2.9, 2.5, 1.0, 1.0])
    assert z == pytest.approx([1.055290, 0.653275, -0.854282, -0.854282], abs=1e-5)
    _, z = advantages(None)
    assert z == pytest.approx([1.062738, 0.531369, -0.398527, -1.195580], abs=1e-5)


def test_a_gate_that_is_missing_is_closed_and_what_is_missing_stays_so() -> None:
    components = torch.tensor([[math.nan, 0.7], [1.0, math.nan], [0.999, 0.7], [2.0, -0.7]])
    rewards = [WeightedReward(Given([]), 1.0, "g"), WeightedReward(Given([]), 1.0, "x", "g")]
    found = gated(components.double(), rewards)[:, 1]
    assert found[[0, 2, 3]].tolist() == pytest.approx([0.0, 0.0, -0.7]) and found[1].isnan()


def test_what_nobody_could_score_is_unscored_and_takes_no_loss(task: Task[NoConfig]) -> None:
    batch = batch_of(task, ["a", "b", "c", "d"])
    first = WeightedReward(Given([None, 1.0, math.inf, None]), 1.0)
    second = WeightedReward(Given([None, None, 1.0, 0.25]), 1.0)
    scored = score_batch(batch, task, [first, second])
    assert scored.column("scored").tolist() == [False, True, False, True]
    assert scored.column("rewards").tolist() == [0.0, 1.0, 0.0, 0.25]
    assert scored.mask.sum(dim=1).tolist() == [0, 2, 0, 4]
    metrics = rollout_metrics(scored, ["first", "second"])
    assert metrics["reward/unscored_frac"] == 0.5
    assert metrics["reward/mean"] == pytest.approx(0.625)  # over the scored rows alone
    assert metrics["reward/component/second"] == pytest.approx(0.625)


def test_a_reward_model_reads_what_others_wrote_between_the_turns(
    task: Task[NoConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turns alone, one after another, are an answer that nobody gave."""
    read: list[list[int]] = []

    def rows(model: object, batch: RolloutBatch) -> torch.Tensor:
        read.extend(ids[own.bool()].tolist() for ids, own in zip(*rows_of(batch), strict=True))
        return torch.zeros(len(batch))

    def rows_of(batch: RolloutBatch) -> tuple[torch.Tensor, torch.Tensor]:
        return batch.response_ids, batch.response_mask

    monkeypatch.setattr(reward_model, "score_batch_rows", rows)
    problem = task.problems("train", 1, 0)[0]
    turns = Completion(
        (8, 9, 10, 11, 12),
        (-1.0,) * 5,
        "length",
        0,
        0,
        "",
        "",
        sampled=(True, False, True, True, False),
    )
    plain = replace(turns, token_ids=(7, 8), logprobs=(-1.0,) * 2, sampled=())
    prompt = PromptGroup(problem, (5, 6))
    tokenizer = ChatTokenizer(make_tiny_tokenizer(), None)
    batch = rollout_batch([SampledGroup(prompt, (turns, plain))], tokenizer)
    verdict = Verdict(0.0, None)
    in_rl = reward_samples(batch, task)
    evaluated = [reward_sample(prompt, each, tokenizer, verdict) for each in (turns, plain)]
    for samples in (in_rl, evaluated):
        assert [sample.response_ids for sample in samples] == [(8, 10, 11), (7, 8)]
        judge = RewardModelReward(RewardModelConfig())
        judge.model, judge.batch_size = None, 4  # type: ignore[assignment]
        judge.score(samples)
    assert read == 2 * [[8, 9, 10, 11], [7, 8]]


def test_an_episode_that_failed_has_no_verdict(task: Task[NoConfig]) -> None:
    batch = batch_of(task, ["right", "right", "", ""])
    lost = replace(batch, failures=("", "", "a crash", "a crash"))
    lost = lost.with_columns(response_mask=lost.response_mask * torch.tensor([[1], [1], [0], [0]]))
    scored = score_batch(lost, task, [WeightedReward(Given([1.0, 1.0, 0.0, 0.0]), 1.0)])
    assert scored.column("acc")[:2].tolist() == [1.0, 1.0]
    assert scored.column("acc")[2:].isnan().all()
    metrics = rollout_metrics(scored, ["given"])
    assert metrics["acc/mean"] == metrics["group/all_correct_frac"] == 1.0
    assert metrics["reward/component/given"] == 1.0
    assert metrics["reward/unscored_frac"] == 0.5
    assert metrics["sampling/duplicate_frac"] == 0.0
    none = score_batch(replace(lost, failures=("a crash",) * 4), task, [])
    assert "acc/mean" not in rollout_metrics(none, [])


def test_an_episode_with_several_branches_counts_once(task: Task[NoConfig]) -> None:
    batch = batch_of(task, ["right", "", "", "wrong"])
    batch = batch.with_columns(episode_id=torch.tensor([0, 0, 0, 1]))
    scored = score_batch(batch, task, [WeightedReward(Given([1.0, 5.0, 5.0, 0.0]), 1.0)])
    metrics = rollout_metrics(scored, ["given"])
    assert metrics["reward/mean"] == metrics["acc/mean"] == metrics["reward/component/given"] == 0.5
    assert metrics["reward/max"] == 1.0


def test_the_greedy_answer_of_an_episode_with_branches_is_its_first(task: Task[NoConfig]) -> None:
    class Played:
        def generate(
            self, engine: object, prompts: Sequence[PromptGroup], *_: object
        ) -> list[SampledGroup]:
            one = Completion((8,), (-1.0,), "stop", 0, 0, "", "", episode=0)
            other = replace(one, token_ids=(9,))
            return [SampledGroup(prompt, (one, other)) for prompt in prompts]

    batch = batch_of(task, ["a", "b"]).with_columns(group_id=torch.tensor([0, 1]))
    scorer = Scorer(
        task,
        [WeightedReward(Given([0.25, 9.0, 0.75, 9.0]), 1.0)],
        ChatTokenizer(make_tiny_tokenizer(), None),
    )
    found = scorer.greedy(None, batch, 4, Played())  # type: ignore[arg-type]
    assert found.tolist() == [0.25, 0.75]


@pytest.mark.parametrize("on_missing", ["zero", "unscored"])
def test_a_reward_of_some_tasks_is_asked_about_their_answers_alone(
    task: Task[NoConfig], on_missing: OnMissing
) -> None:
    """`Given` fails on any other number of samples; what it says nothing of is still missing."""
    batch = batch_of(task, ["a", "b", "c", "d", "e"])
    labels = ["sums", "talk", "sums", "talk", "sums"]
    problems = [replace(p, metadata={TASK: t}) for p, t in zip(batch.problems, labels, strict=True)]
    batch = replace(batch, problems=tuple(problems))
    rewards = [
        WeightedReward(Given([1.0, 0.0, None]), 1.0, "verifier", tasks=("sums",)),
        WeightedReward(Given([0.5, 0.25]), 2.0, "model", tasks=("talk",)),
        WeightedReward(Given([]), 1.0, "nobody", tasks=("other",)),
    ]
    scored = score_batch(batch, task, rewards, on_missing=on_missing)
    assert scored.column("rewards").tolist() == [1.0, 1.0, 0.0, 0.5, 0.0]
    assert scored.column("scored").tolist() == [True, True, True, True, False]
    assert [row[1].value for row in scored.scores] == [None, 0.5, None, 0.25, None]
    metrics = rollout_metrics(scored, ["verifier", "model", "nobody"])
    assert metrics["reward/component/verifier"] == 0.5 and metrics["reward/failures"] == 0
    assert "reward/component/nobody" not in metrics


def test_what_a_stage_lists_is_what_is_scored() -> None:
    listed = [
        RewardComponent(name="given", weight=0.5, tasks=("talk",)),
        RewardComponent(name="given", label="form", only_if="given"),
    ]
    first, second = weighted_rewards(listed, lambda _: Given([]))
    assert (first.name, first.weight, first.only_if, first.tasks) == ("given", 0.5, None, ("talk",))
    assert (second.name, second.weight, second.only_if, second.tasks) == ("form", 1, "given", ())


def test_two_rewards_of_one_plugin_have_two_records(task: Task[NoConfig]) -> None:
    batch = batch_of(task, ["a", "b"])
    rewards = [
        WeightedReward(Given([1.0, 1.0]), 1.0),
        WeightedReward(Given([0.0, 0.5]), 1.0, label="given_2"),
    ]
    scorer = Scorer(task, rewards, ChatTokenizer(make_tiny_tokenizer(), None))
    scored, metrics = scorer.score(batch)
    assert metrics["reward/component/given"] == 1.0
    assert metrics["reward/component/given_2"] == 0.25
    assert sample_rows(scored, scorer.names)[1]["reward/given_2"] == 0.5


def test_a_reward_that_returns_too_few_scores_is_refused(task: Task[NoConfig]) -> None:
    batch = batch_of(task, ["a", "b"])
    with pytest.raises(RunError, match="returned 1 scores for 2 samples"):
        score_batch(batch, task, [WeightedReward(Given([1.0]), 1.0)])


def test_a_reward_is_never_placed_on_a_masked_token() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0], [1, 0, 0]])
    placed = place_on_last_token(torch.tensor([1.0, 2.0, 3.0, 4.0]), mask)
    assert placed.tolist() == [[0, 1, 0], [0, 0, 2], [0, 0, 0], [4, 0, 0]]


def test_kl_in_the_reward_can_make_a_middle_reward_positive(
    task: Task[NoConfig], manager: PluginManager
) -> None:
    batch = batch_of(task, ["x", "x", "right"])
    scored = score_batch(batch, task, [WeightedReward(Given([0.0, 0.0, 0.97]), 1.0)])
    k1 = torch.tensor([[0.2, -0.1, 0.3]]).expand(3, 3)
    shaped = subtract_kl(
        scored.with_columns(old_logprobs=k1, ref_logprobs=torch.zeros(3, 3)),
        manager.build(KlEstimator, "k1"),
        0.1,
    )
    # R_RM = 1, a length penalty of 0.01 a token, k1 = (0.2, -0.1, 0.3), beta = 0.1.
    torch.testing.assert_close(shaped.column("token_rewards")[2], torch.tensor([-0.02, 0.01, 0.94]))
    assert shaped.column("token_rewards")[0, 1:].tolist() == [0.0, 0.0]


def test_the_summed_reward_is_kept_within_its_bounds(task: Task[NoConfig]) -> None:
    batch = batch_of(task, ["right", "wrong", "wrong"])
    rewards = [WeightedReward(Given([3.0, -3.0, 0.5]), 1.0)]
    scored = score_batch(batch, task, rewards, clip=(-1.0, 2.0))
    assert scored.column("rewards").tolist() == [2.0, -1.0, 0.5]
    assert scored.column("token_rewards").sum(dim=1).tolist() == [2.0, -1.0, 0.5]
    assert scored.column("reward_components")[:, 0].tolist() == [3.0, -3.0, 0.5]


def test_a_response_that_repeats_one_of_its_group_is_a_duplicate() -> None:
    batch = response_batch(
        prompts=[[5]] * 6,
        responses=[[8], [8], [8, 9], [8], [7], [7, 7]],
        group_ids=[0, 0, 0, 1, 1, 1],
        pad_token_id=0,
        problems=(),
    )
    assert duplicate_frac(batch) == pytest.approx(1 / 6)
