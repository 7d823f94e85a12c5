"""One suite over every installed plugin: what each kind promises, whoever wrote it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from pydantic import ValidationError

from posttrain.core.contracts import (
    CONTRACTS,
    Reward,
    Task,
)
from posttrain.core.plugin_manager import PluginEntry
from posttrain.core.types import Problem, RewardSample, Verdict
from tests.helpers.plugins import MANAGER, REQUIRED, build, of_kind

REPO = Path(__file__).resolve().parents[2]

# --- every plugin -----------------------------------------------------------------------------


@pytest.mark.parametrize("entry", of_kind())
def test_a_config_survives_the_way_through_json(entry: PluginEntry) -> None:
    config = MANAGER.config(entry.kind, entry.name, REQUIRED.get((entry.kind, entry.name), {}))
    again = json.loads(json.dumps(config.model_dump(mode="json")))
    assert MANAGER.config(entry.kind, entry.name, again) == config


@pytest.mark.parametrize("entry", of_kind())
def test_an_unknown_field_is_refused(entry: PluginEntry) -> None:
    fields = {**REQUIRED.get((entry.kind, entry.name), {}), "no_such_field": 1}
    with pytest.raises(ValidationError, match="no_such_field"):
        MANAGER.config(entry.kind, entry.name, fields)


@pytest.mark.parametrize("entry", of_kind(*(kind for kind in CONTRACTS if kind != "stage")))
def test_every_field_says_what_it_does(entry: PluginEntry) -> None:
    fields = entry.cls.Config.model_fields
    assert not [name for name, field in fields.items() if not field.description]


@pytest.mark.parametrize("entry", of_kind(*(kind for kind in CONTRACTS if kind != "stage")))
def test_the_docstring_gives_a_formula_or_a_source(entry: PluginEntry) -> None:
    doc = entry.cls.__doc__ or ""
    assert doc != (CONTRACTS[entry.kind].__doc__ or ""), "the class has no docstring of its own"
    module_doc = sys.modules[entry.cls.__module__].__doc__ or ""
    assert re.search(r"[Ss]ources?\b|[Ff]ormula| = |arXiv:", doc + module_doc)


@pytest.mark.parametrize("entry", of_kind())
def test_the_file_is_named_after_the_plugin(entry: PluginEntry) -> None:
    if entry.kind == "stage":  # whose classes only say where their code is
        assert (REPO / "pipelines" / "stages" / f"{entry.name}.py").is_file()
    elif entry.package == "posttrain":
        file_name = entry.name.replace("-", "_").replace("+", "_plus")
        assert entry.cls.__module__.rsplit(".", 1)[-1] == file_name


@pytest.mark.parametrize("entry", of_kind())
def test_the_plugin_is_named_in_a_test_of_its_own(entry: PluginEntry) -> None:
    # Presets are tested by what they expand to (test_config_combinations.py), whatever their name.
    if entry.package == "posttrain" and entry.kind != "algorithm":
        quoted = re.compile(rf"[\"'`]{re.escape(entry.name)}[\"'`]")
        assert any(quoted.search(text) for text in texts_of_tests())


@cache
def texts_of_tests() -> list[str]:
    """The files of the tests of parts, but this one; each plugin is looked for in all of them."""
    folders = (REPO / "tests" / folder for folder in ("unit", "contract"))
    files = [path for folder in folders for path in folder.rglob("*.py")]
    return [path.read_text("utf-8") for path in files if path.name != Path(__file__).name]


# --- tasks and rewards ------------------------------------------------------------------------


@pytest.fixture
def in_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the files that `REQUIRED` names for tasks."""
    rows = [{"prompt": f"What is {i} + 2?", "answer": i + 2} for i in range(300)]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "problems.parquet")
    (tmp_path / "gsm8k").mkdir()
    for split, part in (("train", rows[:200]), ("test", rows[200:])):
        lines = [{"question": r["prompt"], "answer": f"Easy.\n#### {r['answer']}"} for r in part]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / "gsm8k" / f"{split}.jsonl").write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def offline_tasks() -> list[Any]:
    """Every task but the one that needs a hub, which has a test with a stand-in, and no task."""
    return [param for param in of_kind("task") if param.id not in ("task-hub", "task-none")]


@pytest.mark.parametrize("entry", offline_tasks())
def test_a_task_keeps_its_splits_apart_and_repeats_itself(
    entry: PluginEntry, in_data_folder: Path
) -> None:
    task: Task[Any] = build(entry)
    keys: dict[str, set[str]] = {"train": set(), "held_out": set()}
    for seed in range(4):
        for split, count in (("train", 50), ("held_out", 10)):
            problems = task.problems(split, count, seed)  # type: ignore[arg-type]
            assert len({p.key for p in problems}) == len(problems) == count
            assert problems == build(entry).problems(split, count, seed)
            keys[split] |= {p.key for p in problems}
    assert not keys["train"] & keys["held_out"]


@pytest.mark.parametrize("entry", offline_tasks())
def test_a_task_accepts_its_own_worked_answers_and_never_raises_on_text(
    entry: PluginEntry, in_data_folder: Path
) -> None:
    task: Task[Any] = build(entry)
    for problem in task.problems("train", 20, seed=0):
        assert isinstance(problem, Problem) and problem.prompt and problem.answer
        assert task.verify(problem, problem.worked).correct == 1.0
        for text in ("", " ", "\x00", "-", "1" * 5000, "((", "\U0001f600", "١٢"):
            assert 0.0 <= task.verify(problem, text).correct < 1.0


@pytest.mark.parametrize("entry", of_kind("reward"))
def test_a_reward_gives_one_score_per_sample_and_the_same_each_time(entry: PluginEntry) -> None:
    if entry.cls.needs_inputs:  # type: ignore[attr-defined]
        pytest.skip(f"reward {entry.name} needs a model; its own tests have one")
    problem = Problem("k", "p", "2", "2")
    samples = [
        RewardSample(problem, (1,), (2,) * n, text, n > 2, Verdict(n % 2, text or None))
        for n, text in enumerate(["", "2", "\x00", "<think></think><answer>2</answer>"])
    ]
    score: Callable[[list[RewardSample]], list[Any]] = build(entry).score
    assert score(samples) == score(samples) and len(score(samples)) == len(samples)
    assert score(samples[::-1]) == score(samples)[::-1]
    assert score([]) == []
    assert isinstance(build(entry), Reward)
