"""avg@k and pass@k while training: golden values, draws of their own, what cannot work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from posttrain.core.config.loading import load_config
from posttrain.core.config.resolve import resolve
from posttrain.core.config.sampled_evaluation import SampledEvaluationSection
from posttrain.core.config.sections import EvaluationSection
from posttrain.core.contracts import NoConfig, PromptGroup
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import ConfigError
from posttrain.core.estimate.tokens import RunData
from posttrain.core.evaluation.sampled import (
    SampledAnswer,
    SampledEvaluation,
    SampledProblem,
    sample_policy,
    sampled_metrics,
)
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.math.intervals import share_interval
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.tracking.metric_names import check_names
from posttrain.core.types import Problem, Verdict
from posttrain.pipelines.api.planned import arithmetic
from tests.helpers.engines import make_engine, make_setup
from tests.unit.test_evaluation import PROBLEMS, EvenLength

WHOLE = EvaluationSection(num_problems=6, max_response_length=12, batch_size=64)


def row(right: int, of: int) -> SampledProblem:
    answers = [
        SampledAnswer(f"text {i % 3}", Verdict(float(i < right), None), i == of - 1)
        for i in range(of)
    ]
    return SampledProblem(Problem("k", "p", "a", "w"), tuple(answers))


@pytest.mark.parametrize(
    ("k", "sizes"),
    [(2, (1, 2)), (8, (1, 2, 4, 8)), (12, (1, 2, 4, 8, 12)), (32, (1, 2, 4, 8, 16, 32))],
)
def test_pass_at_k_is_of_powers_of_two_up_to_k(k: int, sizes: tuple[int, ...]) -> None:
    assert SampledEvaluationSection(k=k).sizes == sizes


def test_the_values_are_the_golden_ones_and_intervals_hold_them() -> None:
    """3 of 10 right: pass@5 is 1 - C(7,5) / C(10,5) = 0.916667; none right is 0."""
    metrics = sampled_metrics([row(3, 10), row(0, 10)], SampledEvaluationSection(k=10))
    assert metrics["eval/avg_at/10"] == pytest.approx(0.15)
    assert metrics["eval/pass_at/1"] == pytest.approx(0.15)
    assert metrics["eval/pass_at/4"] == pytest.approx((1 - 35 / 210) / 2)
    assert metrics["eval/pass_at/10"] == 0.5
    for name in ("avg_at", "pass_at"):
        mean, low, high = (metrics[f"eval/{name}{end}/10"] for end in ("", "_low", "_high"))
        assert low < mean < high
    assert metrics["eval/pass_at_low/4"] == share_interval([1 - 35 / 210, 0.0])[1]
    check_names(metrics)


def test_half_right_counts_in_avg_and_not_in_pass() -> None:
    half = SampledAnswer("x", Verdict(0.5, "x"), False)
    found = SampledProblem(Problem("k", "p", "a", "w"), (half, half))
    assert (found.average, found.pass_at(2)) == (0.5, 0.0)


def test_the_table_has_answers_of_both_kinds() -> None:
    (found,) = SampledEvaluation((row(3, 10),), {}).table()
    assert (found["right"], found["sampled"], found["different"], found["truncated"]) == (
        3,
        10,
        3,
        1,
    )
    assert found["right response 2"] == "text 1" and found["wrong response 1"] == "text 0"


def sample(folder: Path, seed: int = 3, batch_size: int = 64, **fields: Any) -> SampledEvaluation:
    engine = make_engine("transformers")
    engine.start(make_setup(folder))
    tokenizer = ChatTokenizer.load(folder, None)
    prompts = [PromptGroup(p, tokenizer.encode_prompt(p)) for p in PROBLEMS]
    whole = WHOLE.model_copy(update={"batch_size": batch_size})
    section = SampledEvaluationSection(**{"num_problems": 4, "k": 8, **fields})
    return sample_policy(engine, tokenizer, EvenLength(NoConfig()), prompts, section, whole, seed)


def test_draws_depend_on_the_seed_and_not_on_the_batch(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    first = sample(folder)
    assert [r.problem for r in first.rows] == PROBLEMS[:4]
    assert sample(folder, batch_size=1).rows == first.rows
    assert sample(folder, seed=4).rows != first.rows
    assert 0 < first.metrics["eval/avg_at/8"] < 1
    same = sample(folder, top_p=1e-6)
    assert all(len({a.text for a in r.answers}) == 1 for r in same.rows), "only the likeliest token"


HEAD = "task: {name: arithmetic}\nevaluation: {num_problems: 20}\nstages:\n  rl:\n    kind: rl\n"
HEAD += "    inputs: {model: base}\n    steps: 50\n"


def config(folder: Path, extra: str) -> RunData:
    (folder / "a.yaml").write_text(HEAD + extra)
    manager = PluginManager()
    return RunData(resolve(load_config([folder / "a.yaml"], []), manager).config, manager)


def test_more_problems_than_are_held_out_are_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="21 problems are more than the 20 of .*ask for 20"):
        config(tmp_path, "    sampled_evaluation: {num_problems: 21}\n")
    with pytest.raises(ConfigError, match=r"sampled_evaluation\.k"):
        config(tmp_path, "    sampled_evaluation: {k: 1}\n")


def test_plan_says_how_many_answers_are_sampled(tmp_path: Path) -> None:
    data = config(tmp_path, "    sampled_evaluation: {every: 20, num_problems: 10, k: 16}\n")
    text = arithmetic(data.config.stages["rl"], data)
    # Before the first step, after 20 and 40, and after the last, 50.
    assert "avg@16 and pass@k 4 times, 10 problems x 16 = 160 answers" in text
    assert "avg@" not in arithmetic(config(tmp_path, "").config.stages["rl"], data)


def test_the_engine_makes_room_for_all_answers_to_a_problem(tmp_path: Path) -> None:
    extra = "    prompts_per_step: 1\n    num_generations: 2\n    sampled_evaluation: {k: 100}\n"
    assert config(tmp_path, extra).config.stages["rl"].max_sequences() == 100
