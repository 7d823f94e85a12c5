"""The `"gsm8k"` task: its data, its verifier against all marks there are, its preferences."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import Table, parquet

from posttrain.core.contracts import Task
from posttrain.core.data.preference import solutions_of
from posttrain.core.errors import ConfigError, DataError, ResourceError
from posttrain.core.math.answers import number_after
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.runtime.json_files import read_json_lines
from posttrain.core.types import Problem

REPO = Path(__file__).resolve().parents[2]
SAMPLE = REPO / "tests" / "data" / "gsm8k"
WHOLE = REPO.parent / "shared" / "data" / "gsm8k"
SOLUTIONS = "example_model_solutions.jsonl"
MANAGER = PluginManager()
BOTH = [
    pytest.param(SAMPLE, id="sample"),
    pytest.param(
        WHOLE,
        id="whole",
        marks=pytest.mark.skipif(not WHOLE.is_dir(), reason="the whole of GSM8K is not here"),
    ),
]


def build(path: Path | None = SAMPLE, **fields: object) -> Task[Any]:
    return MANAGER.build(Task, "gsm8k", {"path": None if path is None else str(path), **fields})


def every(task: Task[Any], split: Any) -> list[Problem]:
    count = task.available(split)
    assert count is not None
    return task.problems(split, count, seed=0)


TASK = build()
ONE = Problem("k", "p", "1080", "#### 1080")


# --- against everything that is known to be right or wrong --------------------------------------


@pytest.mark.parametrize("folder", BOTH)
def test_every_worked_answer_is_right_and_the_next_number_wrong(folder: Path) -> None:
    task, strict = build(folder), build(folder, strict=True)
    problems = every(task, "train")
    assert len(problems) == (7473 if folder == WHOLE else 9)
    for problem in problems + every(task, "held_out"):
        assert task.verify(problem, problem.worked).correct == 1.0
        assert strict.verify(problem, problem.worked).correct == 1.0
        other = problem.worked.rpartition("#### ")[0] + f"#### {int(problem.answer) + 1}"
        assert task.verify(problem, other).correct == 0.0


@pytest.mark.parametrize("folder", BOTH)
def test_the_verifier_agrees_with_every_mark_of_the_model_solutions(folder: Path) -> None:
    agree: Counter[bool] = Counter()
    for row in read_json_lines(folder / SOLUTIONS, "solutions", "{}"):
        truth = number_after(str(row.values["ground_truth"]), "A:")
        assert truth is not None
        problem = Problem("k", "p", truth, truth)
        for marked in solutions_of(row)[1]:
            found = TASK.verify(problem, marked.solution).correct == 1.0
            agree[found == marked.correct] += 1
    assert agree == {True: 5276 if folder == WHOLE else 44}


# --- the final answer ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "read", "strictly"),
    [
        ("#### 1080", "1080", "1080"),
        ("#### $1,080.00", "1080.00", "1080.00"),
        ("so 7\n#### 1,080 dollars in 2 weeks\n", "1080", None),
        ("#### 12\nno: #### 1080", "1080", "1080"),
        ("#### \nnothing, 1080", "1080", None),
        (r"\boxed{12} then \boxed{1{,}080}", "1080", None),
        (r"\boxed{\text{1 week: }\$1,080}", "1080", None),
        (r"\boxed{\frac{1}{1080}}", None, None),
        (r"it is \boxed{1080", "1080", None),
        ("Of 5 we take 1080.", "1080", None),
        ("#### 1080 = 5 + 1075", "1080", None),
        ("none", None, None),
        ("", None, None),
        ("#### 1080%.", "1080", "1080"),
        ("#### \u22121080", "-1080", "-1080"),
    ],
)
def test_where_the_answer_is_read(text: str, read: str | None, strictly: str | None) -> None:
    assert TASK.verify(ONE, text).parsed == read
    assert TASK.verify(ONE, text).correct == float(read in ("1080", "1080.00"))
    strict = build(strict=True).verify(ONE, text)
    assert strict.parsed == strictly
    assert strict.correct == float(strictly in ("1080", "1080.00"))


def test_numbers_are_compared_exactly() -> None:
    large = Problem("k", "p", "9007199254740993", "")
    assert TASK.verify(large, "#### 9007199254740993.0").correct == 1.0
    assert TASK.verify(large, "#### 9007199254740992").correct == 0.0


@settings(max_examples=50)
@given(st.text() | st.text(alphabet="\\boxed{}#1,. ", max_size=40))
def test_any_text_gets_a_verdict(text: str) -> None:
    assert TASK.verify(ONE, text).correct in (0.0, 1.0)


# --- the data -----------------------------------------------------------------------------------


def test_worked_answers_lose_the_calculator_and_prompts_have_the_template() -> None:
    problem = every(TASK, "train")[0]
    assert "<<" not in problem.worked and problem.worked.endswith(f"\n#### {problem.answer}")
    assert problem.prompt.startswith(TASK.question(problem)) and "####" in problem.prompt
    kept = build(keep_calculator=True, prompt="Q: {question}\nA:")
    assert any("<<" in p.worked for p in every(kept, "train"))
    other = every(kept, "train")[0]
    assert other.prompt == f"Q: {kept.question(other)}\nA:"


@pytest.mark.parametrize("folder", BOTH)
def test_no_question_is_in_both_splits(folder: Path) -> None:
    task = build(folder)
    keys = [{p.key for p in every(task, split)} for split in ("train", "held_out")]
    assert not keys[0] & keys[1] and all(keys)


def test_parquet_files_laid_out_as_on_the_hub_hold_the_same_problems(tmp_path: Path) -> None:
    for split in ("train", "test"):
        rows = [json.loads(line) for line in (SAMPLE / f"{split}.jsonl").read_text().splitlines()]
        table = Table.from_pylist(rows)
        parquet.write_table(table, tmp_path / f"{split}-00000-of-00001.parquet")
    task = build(tmp_path)
    for split in ("train", "held_out"):
        reported = [(p.key, p.worked) for p in every(task, split)]
        assert reported == [(p.key, p.worked) for p in every(TASK, split)]


def test_files_can_be_named_one_by_one_and_are_known_by_their_content(tmp_path: Path) -> None:
    train = shutil.copy(SAMPLE / "train.jsonl", tmp_path / "a.jsonl")
    task = build(Path(train), held_out_path=str(SAMPLE / "test.jsonl"))
    assert task.fingerprint() == TASK.fingerprint()
    assert task.source() == f"{train}, {SAMPLE / 'test.jsonl'}"
    with Path(train).open("a") as stream:
        stream.write('{"question": "And?", "answer": "#### 5"}\n')
    again = build(Path(train), held_out_path=str(SAMPLE / "test.jsonl"))
    assert again.fingerprint() != TASK.fingerprint() and again.available("train") == 10


@pytest.mark.parametrize(
    ("train", "reported"),
    [
        ('{"question": "a", "answer": "6"}', r"train.jsonl:1: the solution ends in '6', expected"),
        ('{"question": "a", "answer": "#### six"}', r"train.jsonl:1: the solution ends in"),
        ('{"question": "a"}', r"train.jsonl:1 needs the texts 'question' and 'answer'"),
        (
            '{"question": "a", "answer": "#### 6"}\n{"question": "a", "answer": "#### 7"}',
            r"train.jsonl:1 and .*train.jsonl:2 hold one question with the answers 6 and 7",
        ),
        (
            '{"question": "b", "answer": "#### 6"}',
            r"test.jsonl:1 and .*train.jsonl:1 hold the same question in both splits",
        ),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, train: str, reported: str) -> None:
    (tmp_path / "train.jsonl").write_text(train)
    (tmp_path / "test.jsonl").write_text('{"question": "b", "answer": "#### 6"}')
    with pytest.raises(DataError, match=reported):
        build(tmp_path)


def test_what_is_not_there_is_told_with_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no train.jsonl and no train.parquet: put it there"):
        build(tmp_path)
    with pytest.raises(DataError, match=r"task.path is .*expected a folder with train.jsonl"):
        build(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="held_out_path needs a path"):
        build(None, held_out_path="a.jsonl")
    with pytest.raises(ConfigError, match=r"expected a text with \{question\} in it"):
        build(prompt="Solve this.")


def test_without_a_hub_one_sentence_says_to_give_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(ResourceError) as raised:
        build(None)
    assert "hub cannot be reached" in str(raised.value) and "set `path` to" in str(raised.value)
    assert "\n" not in str(raised.value)


# --- preferences --------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", BOTH)
def test_a_right_solution_is_preferred_to_a_wrong_one_of_the_same_question(folder: Path) -> None:
    task = build(folder, solutions=str(folder / SOLUTIONS), pairs_per_question=3)
    marks = {
        " ".join(question.split()): {m.solution.rpartition("A:")[2].strip(): m for m in marked}
        for question, marked in map(
            solutions_of, read_json_lines(folder / SOLUTIONS, "solutions", "{}")
        )
    }
    pairs = task.preferences()
    counts = Counter(row.key for row in pairs)
    assert max(counts.values()) == 3 and len(set(counts)) >= 8
    assert len({(row.key, row.texts()) for row in pairs}) == len(pairs)
    for row in pairs:
        assert not any("<<" in answer or "A:" in answer[-20:] for answer in row.texts())
        question = task.question(Problem("", row.prompt[0].content, "", ""))
        known = marks[" ".join(question.split())]
        for answer, correct in zip(row.texts(), (True, False), strict=True):
            last = answer.rpartition("#### ")[2]
            if last in known:
                assert known[last].correct == correct


def test_held_out_questions_give_no_preferences() -> None:
    solutions = SAMPLE / SOLUTIONS
    held_out = {problem.key for problem in every(TASK, "held_out")}
    asked = {" ".join(solutions_of(r)[0].split()) for r in read_json_lines(solutions, "s", "{}")}
    assert held_out & asked, "the sample must have such a question"
    pairs = build(solutions=str(solutions)).preferences()
    questions = {TASK.question(Problem("", row.prompt[0].content, "", "")) for row in pairs}
    assert questions and not held_out & {" ".join(q.split()) for q in questions}


def test_solutions_of_held_out_questions_only_are_refused(tmp_path: Path) -> None:
    held_out = [json.loads(line) for line in (SAMPLE / "test.jsonl").read_text().splitlines()]
    marked = {"is_correct": True, "solution": "A: 1"}
    rows = [{"question": row["question"], "m": marked} for row in held_out]
    (tmp_path / "s.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match="8 of its 8 questions are held out"):
        build(solutions=str(tmp_path / "s.jsonl")).preferences()
    with pytest.raises(DataError, match="set task.solutions to"):
        build().preferences()
    (tmp_path / "s.jsonl").write_text('{"question": "a", "m": {"is_correct": 1}}')
    with pytest.raises(DataError, match=r"s.jsonl:1 has the fields \['m', 'question'\]"):
        build(solutions=str(tmp_path / "s.jsonl")).preferences()
