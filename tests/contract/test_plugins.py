"""Every installed plugin keeps what its kind promises: the checks of `posttrain plugins check`."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from posttrain.core.kit.checks import Check, Skipped, Subject, checks_of
from posttrain.core.plugin_manager import PluginEntry
from tests.helpers.plugins import MANAGER, REQUIRED, of_kind

REPO = Path(__file__).resolve().parents[2]
# Engines have a suite of their own (test_engines.py), and renderers one for each family's tokens.
OWN_SUITE = {"rollout_engine": "transformers", "renderer": "chatml"}


# A process for each of some hundred comparisons.
LONG = [
    ("math_accuracy", "the same scores each time, wherever a sample stands"),
    (
        "math_accuracy",
        "one sound score per sample, whatever the text: never NaN, never a silent None",
    ),
]


def promises() -> list[Any]:
    """(plugin, check) for every check of every installed plugin."""
    return [
        pytest.param(
            entry,
            check,
            id=f"{entry.kind}-{entry.name}-{check.name}",
            marks=[pytest.mark.slow] if (entry.name, check.name) in LONG else [],
        )
        for entry in MANAGER.entries()
        for check in checks_of(entry.kind)
        if not check.kinds or OWN_SUITE.get(entry.kind, entry.name) == entry.name
    ]


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that `REQUIRED` names."""
    folder = tmp_path_factory.mktemp("data")
    rows = [{"prompt": f"What is {i} + 2?", "answer": i + 2} for i in range(300)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "problems.parquet")
    for name in ("gsm8k", "texts"):
        (folder / name).mkdir()
    (folder / "texts" / "a.txt").write_text("A cat sat on the mat.")
    for split, part in (("train", rows[:200]), ("test", rows[200:])):
        lines = [{"question": r["prompt"], "answer": f"Easy.\n#### {r['answer']}"} for r in part]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "gsm8k" / f"{split}.jsonl").write_text(text)
    return folder


@pytest.mark.parametrize(("entry", "check"), promises())
def test_a_plugin_keeps_what_its_kind_promises(
    entry: PluginEntry, check: Check, data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (entry.kind, entry.name) == ("task", "hub") and check.kinds:
        pytest.skip("it needs a hub; its own tests have a stand-in")
    if (entry.kind, entry.name) == ("task", "verifiers") and check.kinds:
        pytest.skip("it needs the package verifiers; its own tests have it")
    monkeypatch.chdir(data_folder)
    try:
        check.function(Subject(entry, MANAGER, REQUIRED.get((entry.kind, entry.name), {})))
    except Skipped as reason:
        pytest.skip(str(reason))


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
