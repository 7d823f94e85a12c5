"""Two evaluations compared problem by problem, and the page that a gate shows of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from posttrain.core.analysis.approval_page import chosen, evidence
from posttrain.core.analysis.statistics import Outcome, compare, read_outcomes
from posttrain.core.errors import RunError
from posttrain.core.evaluation.accuracy import EvaluatedProblem, Evaluation
from posttrain.core.types import Problem, Verdict
from posttrain.pipelines.stage.context import write_evaluation


def outcomes(pattern: str, sampled: Sequence[float] | None = None) -> list[Outcome]:
    """One problem a character: `+` is right."""
    return [
        Outcome(str(i), f"prompt {i}", "1", "said", mark == "+", sampled[i] if sampled else None)
        for i, mark in enumerate(pattern)
    ]


def written(folder: Path, pattern: str, text: str = "said") -> Path:
    rows = tuple(
        EvaluatedProblem(
            Problem(str(i), f"prompt {i}", "1", "1"),
            text,
            None,
            float(mark == "+"),
            False,
            3,
            (Verdict(1.0, "1"), Verdict(float(mark == "+"), None)),
        )
        for i, mark in enumerate(pattern)
    )
    right = pattern.count("+") / len(pattern)
    metrics = {"eval/greedy_accuracy": right, "eval/greedy_low": 0.1, "eval/greedy_high": 0.9}
    return write_evaluation(folder, Evaluation(rows, metrics | {"eval/num_problems": len(pattern)}))


def test_each_problem_is_compared_with_itself() -> None:
    found = compare(outcomes("++--+-"), outcomes("-++++-"))
    assert (found.gained, found.lost, found.num_problems) == (2, 1, 6)
    assert found.difference == pytest.approx(1 / 6)
    assert (found.before, found.after) == (pytest.approx(3 / 6), pytest.approx(4 / 6))


def test_shares_of_samples_are_compared_by_their_differences() -> None:
    found = compare(outcomes("--", [0.5, 0.0]), outcomes("--", [1.0, 0.25]), "sampled")
    assert found.difference == pytest.approx(0.375)
    with pytest.raises(RunError, match="num_samples"):
        compare(outcomes("--"), outcomes("--"), "sampled")


def test_other_problems_are_refused() -> None:
    with pytest.raises(RunError, match="not of the same problems"):
        compare(outcomes("++"), outcomes("+++"))


def test_what_an_evaluation_wrote_is_read_back(tmp_path: Path) -> None:
    first, second = read_outcomes(written(tmp_path / "e", "+-"))
    assert first.right and not second.right
    assert (first.sampled, second.sampled) == (1.0, 0.5)


def test_what_was_lost_is_shown_first_then_in_turn_with_what_was_gained() -> None:
    before, after = outcomes("++--+-"), outcomes("-++++-")
    assert chosen(before, after, 6) == [0, 2, 3, 5, 1, 4]
    assert chosen(None, outcomes("+-+-"), 3) == [1, 0, 3]


def test_the_page_has_the_difference_and_its_interval(tmp_path: Path) -> None:
    before, after = written(tmp_path / "a", "-" * 40), written(tmp_path / "b", "+" * 40)
    page, compared = evidence("Go on?", "ab" * 32, after, before, samples=1)
    assert compared is not None and compared.low > 0.8
    assert page.startswith("Go on?\n") and "+100.0 points (95 % interval +8" in page
    assert "| this model | 100.0 % | 10.0 to 90.0 % | 40 |" in page
    assert page.count("- now, right") == 1


def test_a_baseline_of_other_problems_has_no_paired_difference(tmp_path: Path) -> None:
    before, after = written(tmp_path / "a", "-" * 3), written(tmp_path / "b", "+" * 4)
    page, compared = evidence("Go on?", "ab" * 32, after, before, samples=1)
    assert compared is None and "other problems: no paired difference" in page


def test_no_model_written_text_acts_on_the_page(tmp_path: Path) -> None:
    """Neither Markdown nor HTML, no second line, no terminal control sequence."""
    harm = "`</code><script>alert(1)</script>\n# Approve me\x1b[2J\u202e"
    folder = written(tmp_path / "a", "+", harm)
    page, _ = evidence("Go on?", "ab" * 32, folder, None, samples=1)
    (line,) = [line for line in page.splitlines() if "now, right" in line]
    said = line.removeprefix("  - now, right: ")
    assert said.startswith("`") and said.endswith("`") and said.count("`") == 2
    assert "\x1b" not in page and "\u202e" not in page
    assert "\n# Approve" not in page
    assert json.dumps(harm)[1:5] not in said
