"""The tasks `"parquet"` and `"hub"`: rows through `datasets`, the same problems in any format."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pyarrow
import pytest
from pyarrow import parquet

from posttrain.core.contracts import Task
from posttrain.core.data.json_lines import stream_json_lines
from posttrain.core.data.tables import parquet_rows
from posttrain.core.errors import DataError, ResourceError
from posttrain.core.plugin_manager import PluginManager

MANAGER = PluginManager()
ROWS = [{"q": f"What is {i} + 1?", "a": i + 1, "unread": "x" * 50} for i in range(200)]
FIELDS = {"prompt_field": "q", "answer_field": "a"}


def build(name: str, path: Path, **fields: object) -> Task[Any]:
    return MANAGER.build(Task, name, {"path": str(path), **FIELDS, **fields})


@pytest.fixture
def files(tmp_path: Path) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet", row_group_size=30)
    text = "".join(json.dumps(row) + "\n" for row in ROWS)
    (tmp_path / "a.jsonl").write_text(text)
    return tmp_path


def no_network(*_: object, **__: object) -> NoReturn:
    raise AssertionError("a local file was read through the network")


def test_a_parquet_file_gives_the_problems_of_the_same_lines_without_a_network(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    table, lines = build("parquet", files / "a.parquet"), build("jsonl", files / "a.jsonl")
    for split, count in (("train", 100), ("held_out", 5)):
        found = table.problems(split, count, seed=1)  # type: ignore[arg-type]
        told = lines.problems(split, count, seed=1)  # type: ignore[arg-type]
        assert [(p.key, p.answer) for p in found] == [(p.key, p.answer) for p in told]
    problem = table.problems("train", 1, seed=0)[0]
    row = int(problem.metadata["source"].rpartition(":")[2])
    assert problem.prompt == f"What is {row - 1} + 1?"


def test_only_the_columns_that_are_named_are_read_and_no_more_rows_than_asked(
    files: Path,
) -> None:
    rows = parquet_rows(files / "a.parquet", ("q", "a"), "task.path")
    assert next(rows).values == {"q": "What is 0 + 1?", "a": 1}
    rows.close()
    few = build("parquet", files / "a.parquet", limit=30)
    assert (few.available("train") or 0) + (few.available("held_out") or 0) == 30


def test_a_folder_is_read_in_name_order_and_known_by_all_its_files(files: Path) -> None:
    folder = files / "parts"
    folder.mkdir()
    for number in (1, 0):
        part = pyarrow.Table.from_pylist(ROWS[100 * number : 100 * (number + 1)])
        parquet.write_table(part, folder / f"part-{number}.parquet")
    whole = build("parquet", folder)
    one = build("parquet", files / "a.parquet")
    assert [p.key for p in whole.problems("train", 50, 0)] == [
        p.key for p in one.problems("train", 50, 0)
    ]
    assert str(folder / "part-0.parquet") in whole.source()
    before = whole.fingerprint()
    parquet.write_table(pyarrow.Table.from_pylist(ROWS[:50]), folder / "part-1.parquet")
    assert build("parquet", folder).fingerprint() != before


def test_held_out_rows_can_be_given_apart(files: Path) -> None:
    other = pyarrow.Table.from_pylist([{"q": "Why?", "a": "7"}])
    parquet.write_table(other, files / "b.parquet")
    task = build("parquet", files / "a.parquet", held_out_path=str(files / "b.parquet"))
    assert task.available("train") == 200
    assert [p.answer for p in task.problems("held_out", 1, 0)] == ["7"]


def test_what_is_wrong_with_a_parquet_file_is_told(files: Path) -> None:
    with pytest.raises(DataError, match=r"a.parquet has no column 'prompt', only \['a', 'q', 'un"):
        MANAGER.build(Task, "parquet", {"path": str(files / "a.parquet")})
    with pytest.raises(DataError, match=r"a.jsonl is no Parquet file .*use the task that reads"):
        build("parquet", files / "a.jsonl")
    with pytest.raises(DataError, match=r"nope.parquet, which is not there, .*correct task.path"):
        build("parquet", files / "nope.parquet")
    (files / "empty").mkdir()
    with pytest.raises(DataError, match=r"a folder without \*.parquet files"):
        build("parquet", files / "empty")
    bad = pyarrow.Table.from_pylist([{"q": "a", "a": "six"}])
    parquet.write_table(bad, files / "bad.parquet")
    with pytest.raises(DataError, match=r"bad.parquet:1: field 'a' is 'six', expected a number"):
        build("parquet", files / "bad.parquet")


def test_json_lines_are_read_a_line_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n{"a": "\xe2\x80\xa8"}\n{"a": \xff}\n')
    rows = stream_json_lines(path, "s", "{}")
    assert [next(rows).values for _ in range(2)] == [{"a": 1}, {"a": "\u2028"}]
    with pytest.raises(DataError, match=r"a.jsonl is not UTF-8 \(line 3, byte 6\)"):
        next(rows)


# --- the hub, and a stand-in for it -------------------------------------------------------------

READ = """
import json, sys
from posttrain.core.contracts import Task
from posttrain.core.errors import PosttrainError
from posttrain.core.plugin_manager import PluginManager
try:
    task = PluginManager().build(Task, "hub", json.loads(sys.argv[1]))
    told = [[p.prompt, p.answer] for p in task.problems("train", 3, 0)]
    counts = [task.available("train"), task.available("held_out")]
    print(json.dumps({"problems": told, "counts": counts, "source": task.source(),
                      "digest": task.fingerprint()}))
except PosttrainError as error:
    print(json.dumps({"error": str(error), "code": error.exit_code}))
"""


def read_hub(home: Path, endpoint: str, **fields: object) -> dict[str, Any]:
    """Build the task in a process of its own, whose hub is `endpoint`."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGINGFACE_"))}
    env |= {"HF_HOME": str(home), "HF_ENDPOINT": endpoint}
    config = json.dumps({"dataset": "somebody/sums", **FIELDS, **fields})
    done = subprocess.run(
        [sys.executable, "-c", READ, config], capture_output=True, text=True, env=env, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_hub_that_cannot_be_reached_is_told_at_once(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    found = read_hub(tmp_path, f"http://127.0.0.1:{port}")
    assert found["code"] == ResourceError.exit_code
    assert "the hub cannot be reached and no copy of it is in the cache" in found["error"]
    assert "use the task `parquet` or `jsonl`" in found["error"]
