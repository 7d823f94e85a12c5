"""Whether a process is alive: known by container and kernel, or by a lock, or not at all."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from posttrain.core.errors import ResourceError
from posttrain.core.runtime.processes import (
    Owner,
    hold,
    is_free,
    is_left_behind,
    life,
    life_name,
    owner,
)
from posttrain.core.store.artifacts import ArtifactStore
from posttrain.core.tracking import mlflow_store
from posttrain.core.tracking.mlflow_tracker import PipelineTracker
from posttrain.pipelines.services.processes import find

LIVE = """
import sys, time
from pathlib import Path
from posttrain.core.runtime.processes import life, owner
from posttrain.core.store.artifacts import ArtifactStore
folder = ArtifactStore(Path(sys.argv[1])).begin("rl")
print(owner(), life(Path(sys.argv[2])), folder, sep="|", flush=True)
time.sleep(300)
"""
NEW_CONTAINER = ("unshare", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc")


def skip_without_namespaces() -> None:
    tried = shutil.which("unshare") and subprocess.run([*NEW_CONTAINER, "true"], check=False)
    if not tried or tried.returncode:
        pytest.skip("no new namespace can be made here")


@contextmanager
def running(folder: Path, before: Sequence[str] = ()) -> Iterator[tuple[str, Path, Path]]:
    """A process that computes a stage: its owner, its life file and its private folder."""
    command = [*before, sys.executable, "-c", LIVE, str(folder / "store"), str(folder / "runs")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    alive = "."
    try:
        assert process.stdout is not None
        reported, alive, partial = process.stdout.readline().strip().split("|")
        yield reported, Path(alive), Path(partial)
    finally:
        process.kill()
        process.wait()
        deadline = time.monotonic() + 30
        while not is_free(Path(alive)) and time.monotonic() < deadline:
            time.sleep(0.05)  # its child is killed with it, but not waited for


def start(uri: str, runs: Path) -> PipelineTracker:
    return PipelineTracker.start(
        uri=uri,
        experiment="e",
        run_name="r",
        config_yaml="",
        params={},
        tags={},
        journal=runs,
    )


@pytest.mark.parametrize("before", [(), NEW_CONTAINER], ids=["here", "another container"])
def test_a_live_run_is_left_alone_and_a_dead_one_is_not(
    tmp_path: Path, before: tuple[str, ...]
) -> None:
    """The home is shared, the host name the same, and process 1 or 2 is somebody else here."""
    if before:
        skip_without_namespaces()
    uri = mlflow_store.prepare_database(tmp_path)
    tracker = start(uri, tmp_path / "runs")
    store, client = ArtifactStore(tmp_path / "store"), mlflow_store.connect(uri)
    with running(tmp_path, before) as (reported, alive, partial):
        found = Owner.parse(reported)
        assert found is not None and found.is_visible() == (not before)
        assert alive.name == life_name(reported)
        client.set_tag(tracker.run_id, mlflow_store.TAG_OWNER, reported)
        client.set_tag(tracker.run_id, mlflow_store.TAG_ALIVE, str(alive))
        assert not is_left_behind(reported, alive)
        store.remove_partial()
        assert partial.is_dir()
        assert mlflow_store.kill_running(uri) == []
    assert is_left_behind(reported, alive)
    store.remove_partial()
    assert list((tmp_path / "store").iterdir()) == []
    assert mlflow_store.kill_running(uri) == [tracker.run_id]
    assert not alive.exists()


def test_what_is_recorded_of_a_process_says_whether_it_is_known_to_be_dead(tmp_path: Path) -> None:
    me = Owner.this()
    assert Owner.parse(owner()) == me and me.is_visible()
    lock = tmp_path / "lock"
    lock.write_text("")
    nobody = replace(me, pid=2**22 + 5)
    elsewhere = {
        "another container": replace(nobody, namespace="1"),
        "another container of another host name": replace(nobody, namespace="1", host="h"),
        "before a restart": replace(nobody, boot="0" * 16),
    }
    assert is_left_behind(str(nobody)) and is_left_behind(str(replace(me, start="1")))
    assert not is_left_behind(str(me), lock)
    for what, process in elsewhere.items():
        assert not is_left_behind(str(process)), what
        assert not is_left_behind(str(process), tmp_path / "no-such"), what
        assert is_left_behind(str(process), lock), what
    held = hold(lock)
    assert held is not None and hold(lock) is None and not is_free(lock)
    assert not any(is_left_behind(str(process), lock) for process in elsewhere.values())
    other_machine = replace(nobody, boot="0" * 16, host="h")
    assert not is_left_behind(str(other_machine), lock)


@pytest.mark.parametrize("text", ["", "host", "host@1@5", "h@x@1@2@3", "h@1@1@2@3@4"])
def test_what_no_process_has_written_counts_as_running(text: str, tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("")
    assert not is_left_behind(text, tmp_path / "lock")


def test_a_lock_that_cannot_be_taken_proves_nothing(tmp_path: Path) -> None:
    assert hold(tmp_path / "no" / "folder") is None
    assert not is_free(tmp_path / "no" / "folder")
    (tmp_path / "file").write_text("")
    assert life(tmp_path / "file") is None


def test_a_tag_makes_no_other_file_go(tmp_path: Path) -> None:
    uri = mlflow_store.prepare_database(tmp_path)
    tracker = start(uri, tmp_path / "runs")
    precious = tmp_path / "precious"
    precious.write_text("kept")
    client = mlflow_store.connect(uri)
    client.set_tag(tracker.run_id, mlflow_store.TAG_OWNER, str(replace(Owner.this(), start="1")))
    client.set_tag(tracker.run_id, mlflow_store.TAG_ALIVE, str(precious))
    assert mlflow_store.kill_running(uri) == [tracker.run_id]
    assert precious.read_text() == "kept"


def test_a_service_of_another_container_is_neither_running_here_nor_dead(tmp_path: Path) -> None:
    own = psutil.Process()
    record, lock = tmp_path / "postgres.json", tmp_path / "postgres.lock"
    kept = {"pid": own.pid, "started": own.create_time()}
    record.write_text(json.dumps(kept | {"by": owner()}))
    assert find(record) == own
    other = str(replace(Owner.this(), namespace="1"))
    record.write_text(json.dumps(kept | {"by": other}))
    held = hold(lock)
    with pytest.raises(ResourceError, match=rf"postgres of this home .* remove {record}"):
        find(record)
    for damaged in ("", "[]", "{}", '{"pid": 1}', json.dumps(kept | {"by": 3}), "\udcff"):
        record.write_bytes(damaged.encode("utf-8", "surrogateescape"))
        with pytest.raises(ResourceError, match=f"{record} is not the record of a process"):
            find(record)
    assert held is not None
    os.close(held)
    assert find(record) is None
    record.write_text(json.dumps(kept | {"by": other}))
    assert find(record) is None
