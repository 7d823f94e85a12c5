"""The `"jsonl"` task: people's own data, with an error that names the line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.contracts import Task
from posttrain.core.data.problem_sets import problems_digest
from posttrain.core.errors import ConfigError, DataError
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.types import Problem

MANAGER = PluginManager()


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def build(path: Path, **fields: object) -> Task:  # type: ignore[type-arg]
    return MANAGER.build(Task, "jsonl", {"path": str(path), **fields})


def rows(count: int, start: int = 0) -> list[dict[str, object]]:
    return [{"prompt": f"What is {i} + 1?", "answer": i + 1} for i in range(start, start + count)]


def test_rows_become_problems(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"q": " What?\n", "a": 7, "w": "it is 7"})
    held_out = write(tmp_path / "b.jsonl", {"q": "Why?", "a": "7.5", "w": "7.5"})
    task = build(
        path, held_out_path=str(held_out), prompt_field="q", answer_field="a", worked_field="w"
    )
    (problem,) = task.problems("train", 1, seed=0)
    assert (problem.prompt, problem.answer, problem.worked) == (" What?\n", "7", "it is 7")
    assert problem.metadata["source"] == f"{path}:1"
    assert [p.answer for p in task.problems("held_out", 1, seed=0)] == ["7.5"]


def test_a_file_in_the_home_directory_is_read_and_known_by_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = write(tmp_path / "a.jsonl", *rows(3))
    short = Path("~/a.jsonl")
    assert build(short).fingerprint() == build(path).fingerprint()
    before = build(short).fingerprint()
    write(path, *rows(4))
    assert build(short).fingerprint() != before


def test_splits_of_one_file_are_disjoint_and_complete(tmp_path: Path) -> None:
    task = build(write(tmp_path / "a.jsonl", *rows(300)), held_out_permille=200)
    with pytest.raises(DataError, match=r"'jsonl' has (\d+) distinct problems in its held_out"):
        task.problems("held_out", 300, seed=0)
    counts = {"train": 0, "held_out": 0}
    for split in counts:
        while True:
            try:
                task.problems(split, counts[split] + 1, seed=0)  # type: ignore[arg-type]
            except DataError:
                break
            counts[split] += 1
    train = {p.key for p in task.problems("train", counts["train"], seed=1)}
    held_out = {p.key for p in task.problems("held_out", counts["held_out"], seed=2)}
    assert len(train | held_out) == 300 and not train & held_out
    assert 30 < len(held_out) < 90


def test_a_seed_decides_the_order(tmp_path: Path) -> None:
    task = build(write(tmp_path / "a.jsonl", *rows(100)))
    assert task.problems("train", 20, seed=1) == task.problems("train", 20, seed=1)
    assert task.problems("train", 20, seed=1) != task.problems("train", 20, seed=2)


def test_a_repeated_row_counts_once_and_blank_lines_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"prompt": "a b", "answer": 1}\r\n\r\n{"prompt": "a b", "answer": "1"}\n',
        encoding="utf-8-sig",
    )
    held_out = write(tmp_path / "b.jsonl", {"prompt": "c", "answer": 2})
    task = build(path, held_out_path=str(held_out))
    assert len(task.problems("train", 1, seed=0)) == 1
    with pytest.raises(DataError, match="has 1 distinct problems in its train split, but 2"):
        task.problems("train", 2, seed=0)


def test_white_space_is_kept_and_tells_prompts_apart(tmp_path: Path) -> None:
    prompts = [
        "def f():\n    x",
        "def f():\n  x",
        "def f():\n    x\n",
        " def f():\n    x",
        "a\tb",
        "a b",
    ]
    given = [{"p": p, "a": f" {i}\n", "w": f"  w\n{i} "} for i, p in enumerate(prompts)]
    train = write(tmp_path / "a.jsonl", *given)
    held_out = write(tmp_path / "b.jsonl", {"p": "a b ", "a": "1", "w": "w"})
    fields = {"prompt_field": "p", "answer_field": "a", "worked_field": "w"}
    task = build(train, held_out_path=str(held_out), match="exact", **fields)
    problems = task.problems("train", len(prompts), seed=0)
    found = {(p.prompt, p.answer, p.worked) for p in problems}
    assert found == {(row["p"], row["a"], row["w"]) for row in given}
    assert len({p.key for p in problems}) == len(prompts)
    digest = problems_digest(problems)
    for changed in (replace(problems[0], prompt=problems[0].prompt + " "), problems[0]):
        assert (problems_digest([changed, *problems[1:]]) == digest) == (changed == problems[0])
    for problem in problems:  # white space around an answer is not compared
        assert task.verify(problem, problem.answer.strip()).correct == 1.0
        assert task.verify(problem, f"\n{problem.answer}").correct == 1.0
    contains = build(train, held_out_path=str(held_out), match="contains", **fields)
    assert contains.verify(problems[0], f"it is {problems[0].answer.strip()}.").correct == 1.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"a.jsonl has no rows"),
        ("\n\n", r"a.jsonl has no rows"),
        ('{"prompt": "a", "answer": 1}\n{"prompt": ', r"a.jsonl:2 is not JSON"),
        ("[1, 2]", r"a.jsonl:1 holds '\[1, 2\]', expected a JSON object"),
        ('{"prompt": "a"}', r"a.jsonl:1 has no field 'answer', only \['prompt'\]"),
        ('{"prompt": 3, "answer": 1}', r"a.jsonl:1: field 'prompt' is 3 \(int\), expected non-emp"),
        ('{"prompt": "a", "answer": true}', r"a.jsonl:1: field 'answer' is True \(bool\)"),
        ('{"prompt": "a", "answer": null}', r"a.jsonl:1: field 'answer' is None"),
        ('{"prompt": " ", "answer": 1}', r"a.jsonl:1: field 'prompt' is ' '"),
        ('{"prompt": "a", "answer": "six"}', r"a.jsonl:1: field 'answer' is 'six', expected a num"),
        ('{"prompt": "a", "answer": NaN}', r"a.jsonl:1 is not JSON \(NaN is not JSON\)"),
        ("[" * 100_000, r"a.jsonl:1 is not JSON"),
        (
            '{"prompt": "a", "answer": 1}\n{"prompt": "a", "answer": 2}',
            r"a.jsonl:1 and .*a.jsonl:2 give one prompt the answers '1' and '2'",
        ),
    ],
)
def test_a_broken_file_is_told_by_its_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        build(tmp_path / "a.jsonl")


def test_a_missing_file_an_empty_folder_and_foreign_bytes_are_data_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read .*nope.jsonl"):
        build(tmp_path / "nope.jsonl")
    with pytest.raises(DataError, match="has no .*jsonl file"):
        build(tmp_path)
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
    with pytest.raises(DataError, match="is not UTF-8"):
        build(tmp_path / "latin.jsonl")


def test_paths_start_at_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a.jsonl", *rows(50))
    monkeypatch.chdir(tmp_path)
    assert build(Path("a.jsonl")).problems("train", 1, seed=0)


def test_a_prompt_in_both_files_names_both_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *rows(3))
    held_out = write(tmp_path / "b.jsonl", *rows(2, start=2))
    with pytest.raises(DataError, match=r"a.jsonl:3 and .*b.jsonl:1 hold the same prompt"):
        build(path, held_out_path=str(held_out))


def test_the_ways_to_match(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "a", "answer": "1,234"})
    problem = Problem("a", "a", "1,234", "1,234")
    assert build(path).verify(problem, "so it is 1234.0 indeed").correct == 1.0
    assert build(path).verify(problem, "1234 or 5").correct == 0.0
    assert build(path).verify(problem, "none").parsed is None
    assert build(path, match="exact").verify(problem, " 1,234\n").correct == 1.0
    assert build(path, match="exact").verify(problem, "it is 1,234").correct == 0.0
    assert build(path, match="contains").verify(problem, "it is 1,234!").correct == 1.0
    assert build(path, match="contains").verify(problem, "it is 1234").correct == 0.0


@given(st.text())
def test_any_text_gets_a_verdict(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = write(tmp_path_factory.mktemp("d") / "a.jsonl", {"prompt": "a", "answer": 1})
    for match in ("exact", "last_number", "contains"):
        verdict = build(path, match=match).verify(Problem("a", "a", "1", "1"), text)
        assert verdict.correct in (0.0, 1.0)


def test_the_path_is_required() -> None:
    with pytest.raises(ConfigError, match="task 'jsonl': path: Field required"):
        MANAGER.build(Task, "jsonl")


def test_a_folder_is_all_its_files_and_a_new_file_is_new_data(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    with pytest.raises(DataError, match="has no \\*.jsonl file"):
        build(folder)
    (folder / "b.jsonl").write_text('{"prompt": "2+2", "answer": 4}\n')
    (folder / "a.jsonl").write_text('{"prompt": "1+1", "answer": 2}\n')
    (folder / "notes.txt").write_text("not data")
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"prompt": "3+3", "answer": 6}\n')
    before = build(folder, held_out_path=str(held_out))
    assert {p.prompt for p in before.problems("train", 2, 0)} == {"1+1", "2+2"}
    digest = before.fingerprint()
    (folder / "c.jsonl").write_text('{"prompt": "4+4", "answer": 8}\n')
    after = build(folder, held_out_path=str(held_out))
    assert after.available("train") == 3
    assert after.fingerprint() != digest
    (folder / "d.jsonl").write_text('{"prompt": "1+1", "answer": 3}\n')
    with pytest.raises(DataError, match="a.jsonl:1 and .*d.jsonl:1"):
        build(folder, held_out_path=str(held_out))
