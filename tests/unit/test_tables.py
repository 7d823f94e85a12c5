"""The tasks `"parquet"` and `"hub"`: rows through `datasets`, the same problems in any format."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import pyarrow
import pytest
from pyarrow import parquet

from posttrain.core.contracts import Task
from posttrain.core.data.tables import parquet_rows
from posttrain.core.errors import DataError, ResourceError
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.runtime.json_files import stream_json_lines

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
        reported = lines.problems(split, count, seed=1)  # type: ignore[arg-type]
        assert [(p.key, p.answer) for p in found] == [(p.key, p.answer) for p in reported]
    problem = table.problems("train", 1, seed=0)[0]
    row = int(problem.metadata["source"].rpartition(":")[2])
    assert problem.prompt == f"What is {row - 1} + 1?"


def test_only_the_columns_that_are_named_are_read_and_no_more_rows_than_asked(
    files: Path,
) -> None:
    rows = parquet_rows(files / "a.parquet", ("q", "a"), "task.path")
    assert next(rows).values == {"q": "What is 0 + 1?", "a": 1}
    rows.close()  # type: ignore[attr-defined]
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
    with pytest.raises(DataError, match=r"a.parquet:1 has no field 'prompt', only \['a', 'q', 'un"):
        MANAGER.build(Task, "parquet", {"path": str(files / "a.parquet")})
    with pytest.raises(DataError, match=r"a.jsonl is not a Parquet file .*use the task that reads"):
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

API = "/api/datasets/somebody/sums"
COMMIT = "c0ffee" + "0" * 34
READ = """
import json, sys
from posttrain.core.data.tables import HubSource, hub_rows, resolve_revision
from posttrain.core.errors import PosttrainError
for name, streaming, split in json.loads(sys.argv[1]):
    try:
        hub = resolve_revision(HubSource(name), "use a file")
        rows = list(hub_rows(hub, split, "use a file", streaming=streaming, limit=3))
        reported = {"source": str(hub), "rows": [row.values for row in rows],
                    "where": rows[0].where}
    except PosttrainError as error:
        reported = {"error": str(error), "code": error.exit_code}
    print(json.dumps(reported))
"""


class StandIn(BaseHTTPRequestHandler):
    """As much of a hub as serves one data set of one Parquet file."""

    data = b""
    seen: ClassVar[list[str]] = []
    down = False

    def log_message(self, *_: object) -> None:
        """Silent."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.tell([self.entry()])

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.seen.append(path)
        if self.down:
            self.send(503, b"")
        elif path == f"{API}/tree/{COMMIT}":
            self.tell([self.entry()])
        elif path in (API, f"{API}/revision/{COMMIT}"):
            files = [{"rfilename": self.entry()["path"]}]
            self.tell({"id": "somebody/sums", "sha": COMMIT, "siblings": files, "tags": []})
        elif path.endswith("train-00000-of-00001.parquet"):
            self.send(200, self.data)
        else:
            self.send(404, b"")

    def entry(self) -> dict[str, Any]:
        path = "train-00000-of-00001.parquet"
        return {"type": "file", "path": path, "size": len(self.data), "oid": "0" * 40}

    def tell(self, value: object) -> None:
        self.send(200, json.dumps(value).encode())

    def send(self, status: int, body: bytes) -> None:
        first, last = 0, len(body) - 1
        span = self.headers.get("Range", "").removeprefix("bytes=").split("-")
        if status == 200 and len(span) == 2 and span[0]:
            first, last = int(span[0]), min(last, int(span[1] or last))
            status = 206
        self.send_response(status)
        self.send_header("Content-Length", str(last + 1 - first))
        self.send_header("Accept-Ranges", "bytes")
        if status == 404:
            known = self.path.startswith((API, "/datasets/somebody/sums"))
            self.send_header("X-Error-Code", "EntryNotFound" if known else "RepoNotFound")
        self.send_header("ETag", '"0123456789"')
        self.send_header("X-Repo-Commit", COMMIT)
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(body)}")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[first : last + 1])


@pytest.fixture
def hub(files: Path) -> Iterator[str]:
    StandIn.data = (files / "a.parquet").read_bytes()
    StandIn.seen.clear()
    StandIn.down = False
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def read_hub(home: Path, endpoint: str, *wanted: tuple[str, bool, str]) -> list[dict[str, Any]]:
    """Read (name, streaming, split) one by one, in a process whose hub is `endpoint`."""
    return run_hub(home, endpoint, READ, json.dumps(wanted))


def run_hub(home: Path, endpoint: str, program: str, *arguments: str) -> list[Any]:
    """The lines of JSON that `program` prints."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGINGFACE_"))}
    env |= {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        env=env,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_hub_is_read_at_one_commit_and_what_was_read_is_found_without_it(
    hub: str, tmp_path: Path
) -> None:
    name, home = "somebody/sums", tmp_path / "home"
    streamed, kept, split, nobody_s = read_hub(
        home,
        hub,
        (name, True, "train"),
        (name, False, "train"),
        (name, False, "tset"),
        ("nobody/nothing", False, "train"),
    )
    whole = {"source": f"{name}@{COMMIT}", "rows": ROWS[:3], "where": f"{name}@{COMMIT} train:1"}
    assert streamed == whole and kept == whole
    assert split["code"] == DataError.exit_code and "split 'tset' cannot be read" in split["error"]
    assert nobody_s["error"].startswith(
        "the hub has no data set 'nobody/nothing', or it is private"
    )

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{unused.getsockname()[1]}"
        cached, missing = read_hub(
            home, nowhere, (name, False, "train"), ("somebody/more", True, "train")
        )
    assert (cached["rows"], cached["source"]) == (ROWS[:3], f"{name}@cached")
    assert missing["code"] == ResourceError.exit_code
    assert "the hub cannot be reached and no copy of it is in the cache" in missing["error"]
    assert missing["error"].endswith(": use a file")

    # A hub that is down is asked once for the commit, and the libraries do not ask it again.
    StandIn.seen.clear()
    StandIn.down = True
    (cached,) = read_hub(home, hub, (name, False, "train"))
    assert cached["rows"] == ROWS[:3]
    assert set(StandIn.seen) == {API}


READ_SOURCE = """
import json
from posttrain.core.contracts import Task
from posttrain.core.data.rows import data_digest, data_files, data_rows
from posttrain.core.errors import PosttrainError
from posttrain.core.plugin_manager import PluginManager
rows = list(data_rows("hub:somebody/sums", "s"))
fields = {"path": "hub:somebody/sums#train", "prompt_field": "q", "answer_field": "a"}
task = PluginManager().build(Task, "rows", fields)
try:
    next(data_rows("hub:somebody/sums#tset", "s"))
except PosttrainError as error:
    print(json.dumps([len(rows), rows[0].values, data_digest("hub:somebody/sums", "s"),
                      len(data_files("hub:somebody/sums", "s")), task.source(),
                      (task.available("train") or 0) + (task.available("held_out") or 0),
                      task.fingerprint(), str(error)]))
"""


@pytest.mark.slow
def test_a_hub_s_data_set_is_a_source_of_rows_like_a_file(hub: str, tmp_path: Path) -> None:
    found = [run_hub(tmp_path / name, hub, READ_SOURCE)[0] for name in ("one", "two")]
    assert found[0] == found[1], "the digests are those of the content"
    count, first, digest, files, source, problems, fingerprint, error = found[0]
    assert (count, first, files, problems) == (200, ROWS[0], 0, 200)
    assert len(digest) == len(fingerprint) == 64 and source == "hub:somebody/sums#train"
    assert "split 'tset' cannot be read" in error


def test_the_hub_task_names_its_fields_and_its_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ResourceError, match="use the task `parquet` or `jsonl` on them"):
        MANAGER.build(Task, "hub", {"dataset": "somebody/something-that-is-not-there"})
