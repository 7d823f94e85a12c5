"""Evaluations on a real engine: what is drawn, and what room the engine makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.core.config.loading import load_config
from posttrain.core.config.sections import EvaluationSection
from posttrain.core.contracts import NoConfig, PromptGroup, Task
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.evaluation.accuracy import EvaluatedProblem, Evaluation, evaluate_policy
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.math.intervals import (
    newcombe_difference,
    paired_means,
    paired_proportions,
)
from posttrain.core.types import Problem, Split, Verdict
from posttrain.pipelines.stage.context import write_evaluation
from posttrain.pipelines.stage.engines import largest_request
from posttrain.pipelines.stages.evaluate import gains
from tests.helpers.engines import make_engine, make_setup

PROBLEMS = [Problem(f"p{i}", f"say {i}", "", "") for i in range(6)]


class EvenLength(Task[NoConfig]):
    """An answer is right when it has an even number of characters: half of them, by chance."""

    name = "even_length"
    Config = NoConfig

    def problems(self, split: Split, count: int, seed: int) -> list[Problem]:
        return PROBLEMS[:count]

    def verify(self, problem: Problem, text: str) -> Verdict:
        return Verdict(float(len(text) % 2 == 0), text)


def evaluate(folder: Path, batch_size: int, top_p: float = 1.0) -> Evaluation:
    engine = make_engine("transformers")
    engine.start(make_setup(folder))
    section = EvaluationSection(
        num_problems=6, max_response_length=12, num_samples=16, batch_size=batch_size, top_p=top_p
    )
    tokenizer = ChatTokenizer.load(folder, None)
    prompts = [PromptGroup(p, tokenizer.encode_prompt(p)) for p in PROBLEMS]
    return evaluate_policy(engine, tokenizer, EvenLength(NoConfig()), prompts, section, seed=3)


def test_the_batch_size_changes_no_answer(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    whole, split = evaluate(folder, 6), evaluate(folder, 4)
    assert split.rows == whole.rows
    assert len({row.sampled_accuracy for row in whole.rows}) > 1  # otherwise it would show nothing


def test_the_sampled_answers_are_drawn_with_the_top_p_of_the_section(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    almost_greedy, free = evaluate(folder, 6, top_p=1e-6), evaluate(folder, 6)
    # Only the most likely token is left, so each sampled answer is the greedy one.
    for row in almost_greedy.rows:
        assert row.sampled_accuracy == row.greedy_correct
    assert [row.sampled_accuracy for row in free.rows] != [row.greedy_correct for row in free.rows]
    # The greedy answers take no part in it.
    assert [r.greedy_text for r in free.rows] == [r.greedy_text for r in almost_greedy.rows]


@pytest.mark.parametrize(
    ("overrides", "rows"),
    [
        ([], 16 * 8),
        (["stages.rl.prompts_per_step=40"], 320),
        (["stages.reward_model.num_generations=9"], 16 * 9),
        (["evaluation.batch_size=150"], 150),
    ],
)
def test_the_engine_makes_room_for_the_largest_request_of_any_stage(
    overrides: list[str], rows: int
) -> None:
    loaded = load_config([Path("quickstart")], overrides)
    assert largest_request(loaded.config) == rows


def written(folder: Path, right: int, samples: int, first: int = 0) -> Path:
    """An evaluation of 40 problems: `right` solved greedily, and `samples` of four of the rest."""
    rows = tuple(
        EvaluatedProblem(
            Problem(f"p{first + i}", "", "", ""),
            *("", None, float(i < right), False, 1),
            sampled=tuple(Verdict(float(i < right or k < samples), None) for k in range(4)),
        )
        for i in range(40)
    )
    return write_evaluation(folder, Evaluation(rows, {}))


def test_gains_over_a_baseline_compare_each_problem_with_itself(tmp_path: Path) -> None:
    before, after = written(tmp_path / "before", 20, 0), written(tmp_path / "after", 26, 1)
    found = gains(before, after)
    # Six problems of 40 are gained, none lost; independent samples of this size would show nothing.
    expected = dict(zip(("", "_low", "_high"), paired_proportions(6, 0, 40), strict=True))
    assert found.items() >= {f"eval/gain{end}": v for end, v in expected.items()}.items()
    assert found["eval/gain_low"] > 0 > newcombe_difference((20, 40), (26, 40))[1]
    shares = [0.0] * 20 + [1.0] * 6 + [0.25] * 14
    sampled = dict(zip(("", "_low", "_high"), paired_means(shares), strict=True))
    assert found.items() >= {f"eval/sampled_gain{end}": v for end, v in sampled.items()}.items()


def test_gains_over_a_baseline_of_other_problems_are_those_of_independent_ones(
    tmp_path: Path,
) -> None:
    before, after = written(tmp_path / "before", 20, 0, first=7), written(tmp_path / "after", 26, 1)
    independent = newcombe_difference((20, 40), (26, 40))
    names = ("eval/gain", "eval/gain_low", "eval/gain_high")
    assert gains(before, after) == dict(zip(names, independent, strict=True))
