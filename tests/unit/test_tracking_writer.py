"""The background writer and the write-ahead journal, with real threads, files and processes."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from posttrain.core.errors import ResourceError, RunError
from posttrain.core.tracking.journal import Journal, JournalRow, journal_path, read_journal
from posttrain.core.tracking.metric_names import METRICS, PREFIXES, check_names, find_metric
from posttrain.core.tracking.spool import Operation, Spool
from posttrain.core.tracking.writer import Writer

CHILD = """
import os, sys
from pathlib import Path
from posttrain.core.tracking.journal import Journal, JournalRow
journal = Journal(Path(sys.argv[1]))
for step in range(1, 51):
    journal.append(JournalRow(step, step * 1000, {"lr": step / 10}))
os._exit(9)
"""


def fail() -> None:
    raise ValueError("disk full")


def run_job(operation: Operation, again: bool) -> str:
    return str(operation["job"]())


def job(what: str, run: Callable[[], object]) -> Operation:
    return {"op": "job", "what": what, "request": "pending", "job": run}


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    made = Writer("sqlite:///x", run_job, Spool(tmp_path / "spool", {}), max_waiting=300)
    yield made
    made.close()


def test_jobs_run_in_order_on_one_other_thread(writer: Writer) -> None:
    seen, overtaken = list[int](), threading.Event()
    waited = list[bool]()
    writer.submit(job("slow", lambda: waited.append(overtaken.wait(0.3))))
    writer.submit(job("thread", lambda: seen.append(threading.get_ident())))
    writer.submit(job("quick", overtaken.set))
    for number in range(200):
        writer.submit(job("n", partial(seen.append, number)))
    writer.flush()
    assert waited == [False]
    assert seen[0] != threading.get_ident() and seen[1:] == list(range(200))


def test_a_failed_job_is_raised_at_flush_and_names_what_and_where(writer: Writer) -> None:
    writer.submit(job("step 7", fail))
    with pytest.raises(RunError, match="record step 7 in MLflow at sqlite:///x: disk full"):
        writer.flush()
    assert writer.failed
    writer.flush()  # reported once


def test_a_failed_job_is_raised_at_the_next_call_and_later_jobs_still_run(writer: Writer) -> None:
    seen = list[int]()
    writer.submit(job("step 1", fail))
    writer.drain()
    with pytest.raises(RunError, match="step 1"):
        writer.submit(job("step 2", partial(seen.append, 2)))
    writer.submit(job("step 3", partial(seen.append, 3)))
    writer.flush()
    assert seen == [2, 3]


def test_call_waits_for_earlier_jobs_and_returns_the_result(writer: Writer) -> None:
    seen, gate = list[int](), threading.Event()
    writer.submit(job("slow", lambda: gate.wait(5)))
    writer.submit(job("then", partial(seen.append, 1)))
    gate.set()
    assert writer.call(job("sum", lambda: len(seen))) == "1"
    with pytest.raises(RunError, match="disk full"):
        writer.call(job("bad", fail))
    assert writer.failed


def test_what_fails_otherwise_is_tried_once(writer: Writer) -> None:
    tried: list[int] = []

    def fails() -> None:
        tried.append(1)
        raise OSError("no room")

    writer.submit(job("a thing", fails))
    with pytest.raises(RunError, match="no room"):
        writer.flush()
    assert tried == [1]


def test_a_killed_process_leaves_every_measured_step_in_its_journal(tmp_path: Path) -> None:
    path = journal_path(tmp_path, "rl")
    child = subprocess.run([sys.executable, "-c", CHILD, str(path)], check=False, timeout=60)
    assert child.returncode == 9
    rows = read_journal(path)
    assert [row.step for row in rows] == list(range(1, 51))
    assert rows[-1] == JournalRow(50, 50_000, {"lr": 5.0})


def test_a_half_written_last_line_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "metrics-rl.jsonl"
    whole = JournalRow(1, 5, {"lr": 0.5})
    for cut in ('{"step":2,"time_ms":6,"met', '{"step":2,"time_ms":6,"metrics":{"lr":0.5}}'):
        path.write_text(whole.line() + cut)
        assert read_journal(path) == [whole]


def test_opening_keeps_rows_up_to_the_resumed_step_and_appends_after_them(tmp_path: Path) -> None:
    path = tmp_path / "metrics-rl.jsonl"
    first = Journal(path)
    for step in (0, 1, 2, 3):
        first.append(JournalRow(step, step, {"lr": 0.1}))
    first.close()
    second = Journal(path, keep_through=2)
    assert [row.step for row in second.kept] == [0, 1, 2]
    second.append(JournalRow(3, 33, {"lr": 0.2}))
    second.close()
    assert [row.time_ms for row in read_journal(path)] == [0, 1, 2, 33]
    fresh = Journal(path)
    fresh.close()
    assert fresh.kept == [] and read_journal(path) == []


def test_a_journal_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="choose another --home"):
        Journal(tmp_path / "file" / "metrics-rl.jsonl")


def test_infinities_survive_the_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.jsonl")
    journal.append(JournalRow(1, 1, {"ratio/max": float("inf")}))
    journal.close()
    assert read_journal(tmp_path / "j.jsonl")[0].metrics == {"ratio/max": float("inf")}


def test_a_misspelt_metric_is_refused_with_the_nearest_name() -> None:
    check_names(["reward/mean", "reward/component/accuracy", "plugin/mine"])
    with pytest.raises(RunError, match="unknown metric 'reward/maen'; did you mean 'reward/mean'"):
        check_names(["reward/maen"])
    with pytest.raises(RunError, match="reward/component/"):
        check_names(["reward/component/"])


def test_every_metric_has_a_unit_and_a_name_mlflow_accepts() -> None:
    for name, metric in {**METRICS, **PREFIXES}.items():
        assert metric.unit and metric.description
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789_/")
    found = find_metric("reward/component/x")
    assert found is PREFIXES["reward/component/"] and find_metric("nothing") is None


def test_importing_the_config_or_the_names_does_not_import_mlflow() -> None:
    code = (
        "import sys, json, posttrain.core.config.schema, posttrain.core.tracking.metric_names;"
        "print(json.dumps([m for m in ('mlflow', 'matplotlib') if m in sys.modules]))"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(child.stdout) == []
