"""The same held-out prompts over the steps of a stage, also after an interruption."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.core.errors import ResourceError
from posttrain.core.evaluation.accuracy import EvaluatedProblem
from posttrain.core.types import Problem
from posttrain.pipelines.rl.recording import TRACKED_FILE, TRACKED_PROMPTS, tracked_rows


def evaluated(step: int, count: int = 3) -> list[EvaluatedProblem]:
    """Problem 0 is right from step 10 on, the others never."""
    return [
        EvaluatedProblem(
            Problem(f"k{i}", f"What is {i}?", str(i), ""),
            f"answer {i} at {step}",
            None,
            float(i == 0 and step >= 10),
            False,
            3,
        )
        for i in range(count)
    ]


def test_each_evaluation_is_a_column_and_each_prompt_a_row(tmp_path: Path) -> None:
    for step in (0, 10, 20):
        rows = tracked_rows(tmp_path / "new", step, evaluated(step))
    assert rows[0] == {
        "prompt": "What is 0?",
        "answer": "0",
        "step 0": "✗ answer 0 at 0",
        "step 10": "✓ answer 0 at 10",
        "step 20": "✓ answer 0 at 20",
    }
    assert list(rows[2]) == ["prompt", "answer", "step 0", "step 10", "step 20"]
    assert rows[2]["step 20"] == "✗ answer 2 at 20"


def test_a_stage_that_goes_on_from_an_earlier_step_drops_what_it_computes_again(
    tmp_path: Path,
) -> None:
    for step in (0, 10, 20):
        tracked_rows(tmp_path, step, evaluated(step))
    assert list(tracked_rows(tmp_path, 10, evaluated(10))[0])[2:] == ["step 0", "step 10"]
    assert list(tracked_rows(tmp_path, 0, evaluated(0))[0])[2:] == ["step 0"]


def test_some_prompts_are_followed_and_long_answers_are_cut(tmp_path: Path) -> None:
    problems = evaluated(0, count=TRACKED_PROMPTS + 5)
    object.__setattr__(problems[0], "greedy_text", "x" * 9000)
    rows = tracked_rows(tmp_path, 0, problems)
    assert len(rows) == TRACKED_PROMPTS and len(str(rows[0]["step 0"])) == 2002


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="cannot be kept: .*file"):
        tracked_rows(tmp_path / "file" / TRACKED_FILE, 0, evaluated(0))


def test_a_write_that_fails_leaves_no_part_of_a_file(tmp_path: Path) -> None:
    (tmp_path / TRACKED_FILE / "in the way").mkdir(parents=True)
    with pytest.raises(ResourceError, match="cannot be kept"):
        tracked_rows(tmp_path, 10, evaluated(10))
    assert [path.name for path in tmp_path.iterdir()] == [TRACKED_FILE]
