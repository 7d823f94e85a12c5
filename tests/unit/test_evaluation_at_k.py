"""pass@k, avg@k, maj@k, rm@k: known numbers, errors over problems, settings that cannot work."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from posttrain.core.config.loading import load_config
from posttrain.core.config.resolve import resolve
from posttrain.core.config.sections import EvaluationSection
from posttrain.core.contracts import NoConfig, PromptGroup, Reward, RewardContext, SampledGroup
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import ConfigError
from posttrain.core.evaluation.accuracy import EvaluatedProblem, evaluate_policy
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.math.correction import effective_sample_size
from posttrain.core.math.groups import pass_at_k, pass_at_k_scores
from posttrain.core.models.device import ModelRuntime
from posttrain.core.models.loading import load_reward_model, save_reward_model
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.tracking.metric_names import check_names
from posttrain.core.types import (
    Completion,
    Problem,
    RewardSample,
    SamplingParams,
    Score,
    Verdict,
)
from posttrain.pipelines.run.summary import pass_sizes, with_error
from posttrain.plugins.rewards.reward_model import RewardModelConfig, RewardModelReward
from tests.helpers.engines import make_engine, make_setup
from tests.unit.test_evaluation import PROBLEMS, EvenLength

PROBLEM = Problem("k", "p", "a", "w")


def row(*verdicts: tuple[float, str | None]) -> EvaluatedProblem:
    sampled = tuple(Verdict(correct, parsed) for correct, parsed in verdicts)
    return EvaluatedProblem(PROBLEM, "", None, 0.0, False, 1, sampled)


@pytest.mark.parametrize(
    ("total", "correct", "k", "expected"),
    [(10, 3, 1, 0.3), (10, 3, 5, 0.916667), (16, 4, 8, 0.961538)],
)
def test_pass_at_k_has_the_golden_values(total: int, correct: int, k: int, expected: float) -> None:
    assert pass_at_k(total, correct, k) == pytest.approx(expected, abs=5e-7)


def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_answer() -> None:
    for correct, k in itertools.product(range(8), range(1, 8)):
        subsets = list(itertools.combinations([True] * correct + [False] * (7 - correct), k))
        expected = sum(map(any, subsets)) / len(subsets)
        assert pass_at_k(7, correct, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_of_many_samples_neither_overflows_nor_leaves_its_range() -> None:
    assert pass_at_k(100_000, 0, 50_000) == 0
    assert pass_at_k(100_000, 50_001, 50_000) == 1
    assert pass_at_k(100_000, 1, 50_000) == pytest.approx(0.5)


def test_the_analytic_advantage_and_the_sample_size_have_the_golden_values() -> None:
    verdicts = torch.tensor([1.0, 1, 0, 0, 0, 0, 0, 0], dtype=torch.float64)
    right, wrong = pass_at_k_scores(verdicts, 4)[[0, 7]].tolist()
    assert (right, wrong) == pytest.approx((0.522233, -0.174078), abs=1e-6)
    assert effective_sample_size(torch.tensor([1.0, 1, 1, 5])) == pytest.approx(0.571429, abs=1e-6)


def test_avg_at_k_is_the_mean_verdict_of_the_first_k() -> None:
    found = row((1.0, "2"), (0.5, "x"), (0.0, None), (0.0, None))
    assert [found.avg_at(k) for k in (1, 2, 4)] == [1.0, 0.75, 0.375]
    assert found.pass_at(1) == 0.25, "half right is not right"


@pytest.mark.parametrize(
    ("verdicts", "k", "expected"),
    [
        ([(0.0, "3"), (1.0, "2"), (1.0, "2")], 3, 1.0),
        ([(0.0, "3"), (1.0, "2"), (1.0, "2")], 2, 0.0),  # a tie: the earlier
        ([(1.0, "2"), (0.0, "3"), (0.0, "4")], 3, 1.0),
        ([(0.0, None), (0.0, None), (1.0, "2")], 3, 1.0),  # what could not be read has no vote
        ([(0.0, None), (0.0, None)], 2, 0.0),
    ],
)
def test_maj_at_k_takes_the_answer_read_most_often(
    verdicts: list[tuple[float, str | None]], k: int, expected: float
) -> None:
    assert row(*verdicts).maj_at(k) == expected


@pytest.mark.parametrize(
    ("scores", "k", "expected"),
    [
        ((0.1, 0.9, 2.0), 2, 1.0),
        ((0.1, 0.9, 2.0), 3, 0.0),  # half right is not right
        ((0.9, 0.9, -1.0), 2, 0.0),  # a tie: the earlier
        ((-3.0, -4.0, -5.0), 3, 0.0),
    ],
)
def test_rm_at_k_takes_the_answer_with_the_highest_score(
    scores: tuple[float, ...], k: int, expected: float
) -> None:
    found = replace(row((0.0, "3"), (1.0, "2"), (0.5, "4")), scores=scores)
    assert found.rm_at(k) == expected


def test_a_reward_model_chooses_by_the_scores_that_transformers_computes(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    tokenizer = ChatTokenizer.load(folder, None)
    runtime = ModelRuntime(torch.device("cpu"), torch.float32, "sdpa")
    model = load_reward_model(folder, runtime, new_head=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        torch.nn.init.normal_(model.get_submodule("score").weight, std=0.3)  # type: ignore[arg-type]
    judge = tmp_path / "judge"
    save_reward_model(model, tokenizer.tokenizer, judge, set(tokenizer.end_token_ids))
    engine = make_engine("transformers")
    engine.start(make_setup(folder))
    kept: list[RewardSample] = []

    class Kept(RewardModelReward):
        def score(self, samples: Sequence[RewardSample]) -> list[Score]:
            kept.extend(samples)
            return super().score(samples)

    ranker = Kept(RewardModelConfig(transform="none"))
    inputs = {"reward_model": judge}
    ranker.setup(RewardContext(inputs, torch.float32, torch.device("cpu"), "sdpa", 5))
    section = EvaluationSection(
        num_problems=6, max_response_length=12, num_samples=8, pass_at=(1, 4, 8), batch_size=4
    )
    prompts = [PromptGroup(p, tokenizer.encode_prompt(p)) for p in PROBLEMS]
    task = EvenLength(NoConfig())
    found = evaluate_policy(engine, tokenizer, task, prompts, section, 3, reward_model=ranker)
    plain = evaluate_policy(engine, tokenizer, task, prompts, section, 3)
    assert [r.sampled for r in found.rows] == [r.sampled for r in plain.rows]
    assert not any("rm_" in name for name in plain.metrics)
    again = AutoModelForSequenceClassification.from_pretrained(judge, trust_remote_code=False)
    with torch.no_grad():
        expected = [
            again(torch.tensor([[*s.prompt_ids, *s.response_ids]])).logits.item() for s in kept
        ]
    scores = [score for r in found.rows for score in r.scores]
    assert scores == pytest.approx(expected, abs=1e-5)
    assert len({round(score, 4) for score in scores}) > 20, "otherwise this test shows nothing"
    for k in (4, 8):
        chosen = [max(range(k), key=r.scores.__getitem__) for r in found.rows]
        right = [r.sampled[i].correct for r, i in zip(found.rows, chosen, strict=True)]
        assert found.metrics[f"eval/rm_at/{k}"] == pytest.approx(sum(right) / 6)
        gain = found.metrics[f"eval/rm_at/{k}"] - found.metrics[f"eval/avg_at/{k}"]
        assert found.metrics[f"eval/rm_gain_at/{k}"] == pytest.approx(gain)
        low, high = (found.metrics[f"eval/rm_gain_at_{end}/{k}"] for end in ("low", "high"))
        assert low < gain < high
    assert found.metrics["eval/rm_gain_at/1"] == 0, "there is nothing to choose from"
    assert "eval/rm_gain_at_low/1" not in found.metrics, "equal gains have no width to show"
    check_names(found.metrics)


class Lost:
    """The first of each problem's episodes has failed."""

    def generate(
        self, engine: object, prompts: Sequence[PromptGroup], params: SamplingParams, *_: object
    ) -> list[SampledGroup]:
        said = Completion((5, 6), (-1.0, -1.0), "stop", 0, 0, "", "")
        lost = replace(said, token_ids=(), logprobs=(), finish_reason="length", failed="a crash")
        rest = (said,) * (params.num_generations - 1)
        return [SampledGroup(prompt, (lost, *rest)) for prompt in prompts]


class FirstIsBest(Reward[NoConfig]):
    """Scores that fall from answer to answer."""

    name, Config = "first_is_best", NoConfig

    def score(self, samples: Sequence[RewardSample]) -> list[Score]:
        assert not any(sample.response_ids == () for sample in samples)
        return [Score(-float(place)) for place in range(len(samples))]


def test_an_episode_that_failed_is_wrong_whatever_it_left_and_is_shown(tmp_path: Path) -> None:
    """The verifier finds an empty text right, and the reward model would take it for the best."""
    tokenizer = ChatTokenizer.load(make_tiny_model(tmp_path / "model"), None)
    found = evaluate_policy(
        None,  # type: ignore[arg-type]  # `Lost` asks none
        tokenizer,
        EvenLength(NoConfig()),
        [PromptGroup(problem, (1, 2)) for problem in PROBLEMS[:2]],
        EvaluationSection(num_problems=2, num_samples=4, pass_at=(4,)),
        seed=0,
        episodes=Lost(),  # type: ignore[arg-type]
        reward_model=FirstIsBest(NoConfig()),
    )
    assert found.metrics["eval/greedy_accuracy"] == 0.0
    assert found.metrics["eval/failed_frac"] == 1.0
    assert found.metrics["eval/sampled_failed_frac"] == 0.25
    assert found.metrics["eval/sampled_accuracy"] == found.metrics["eval/avg_at/4"] == 0.75
    assert found.metrics["eval/rm_at/4"] == 1.0
    assert found.rows[0].scores == (None, 0.0, -1.0, -2.0)
    check_names(found.metrics)


def test_an_evaluation_reports_each_k_with_its_error_over_problems(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    engine = make_engine("transformers")
    engine.start(make_setup(folder))
    section = EvaluationSection(
        num_problems=6, max_response_length=12, num_samples=8, pass_at=(1, 4), majority=True
    )
    tokenizer = ChatTokenizer.load(folder, None)
    prompts = [PromptGroup(p, tokenizer.encode_prompt(p)) for p in PROBLEMS]
    found = evaluate_policy(engine, tokenizer, EvenLength(NoConfig()), prompts, section, seed=3)
    values = [r.pass_at(4) for r in found.rows]
    assert 0 < sum(values) < 6, "otherwise this test shows nothing"
    assert found.metrics["eval/pass_at/4"] == pytest.approx(sum(values) / 6)
    spread = torch.tensor(values, dtype=torch.float64).std() / math.sqrt(6)
    assert found.metrics["eval/pass_at_se/4"] == pytest.approx(float(spread))
    assert found.metrics["eval/pass_at/1"] == pytest.approx(found.metrics["eval/sampled_accuracy"])
    assert {"eval/avg_at/1", "eval/avg_at_se/4", "eval/maj_at/4"} <= set(found.metrics)
    check_names(found.metrics)


def test_more_tries_than_samples_are_a_config_error_with_the_mend() -> None:
    overrides = ["evaluation.pass_at=[1, 16]", "evaluation.num_samples=8"]
    with pytest.raises(ConfigError, match=r"pass_at 16 .* num_samples 8; set num_samples to 16"):
        load_config([Path("quickstart")], overrides)


def test_a_majority_needs_its_sizes() -> None:
    with pytest.raises(ConfigError, match=r"majority needs the sizes k"):
        load_config([Path("quickstart")], ["evaluation.majority=true"])


def test_a_reward_model_needs_answers_to_choose_from() -> None:
    reads = "stages.evaluate.inputs.reward_model=reward_model"
    one = "stages.evaluate.evaluation={num_samples: 1}"
    with pytest.raises(ConfigError, match=r"1 leaves no choice; set it to 2 or more, or remove"):
        resolve(load_config([Path("quickstart")], [reads, one]), PluginManager())


def test_the_summary_has_a_column_for_each_k() -> None:
    measured = {"eval/pass_at/16": 0.5, "eval/pass_at_se/16": 0.031, "eval/pass_at/4": 0.25}
    assert pass_sizes([{}, measured]) == [4, 16]
    assert with_error(measured, "pass_at/16", "pass_at_se/16") == "50.0 % +- 3.1"
    assert with_error(measured, "pass_at/4", "pass_at_se/4") == "25.0 %"
    assert with_error({}, "pass_at/4", "pass_at_se/4") == "-"
