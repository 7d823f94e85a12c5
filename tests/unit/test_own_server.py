"""Prefect's own server: what a run reported it is stored before the run ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from posttrain.pipelines.run.prefect_server import FLUSH_INTERVAL, OwnServer
from tests.helpers.pipeline import environment, prepared

PROGRAM = """
import sqlite3, sys
from pathlib import Path
from posttrain.pipelines.run.prefect_env import configure_prefect
home = Path(sys.argv[1])
configure_prefect(home)
from posttrain.pipelines.run.prefect_server import OwnServer
server = OwnServer(home)
server.begin()
from prefect import flow
from prefect.runtime import flow_run
from posttrain.pipelines.run.flow_records import announce

@flow
def reported():
    announce("posttrain.eval.improved", "run", "rl", {})
    return str(flow_run.id)

server.wait()
server.wait_for_events(reported())
database = sqlite3.connect(f"file:{home}/prefect/prefect.db?mode=ro", uri=True)
print([name for (name,) in database.execute("select event from events order by occurred")])
"""


def test_a_run_s_events_are_stored_when_it_ends(tmp_path: Path) -> None:
    home = prepared(tmp_path / "home")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(home)],
        capture_output=True,
        text=True,
        timeout=240,
        # Rarer than in a run, so that events are not stored by chance before anybody waits.
        env=environment() | {FLUSH_INTERVAL: "2"},
    )
    assert done.returncode == 0, done.stderr
    stored = done.stdout.splitlines()[-1]
    assert "posttrain.eval.improved" in stored and "prefect.flow-run.Completed" in stored
    assert "lack" not in done.stderr


LATE = """
import os, signal, sys
from pathlib import Path
from posttrain.pipelines.run.prefect_env import configure_prefect
home = Path(sys.argv[1])
configure_prefect(home)
from posttrain.pipelines.run.prefect_server import OwnServer
server = OwnServer(home)
server.begin()
from prefect import flow
import posttrain.pipelines.rl.prefect_away
from posttrain.pipelines.cli.__main__ import leave_soon
from posttrain.pipelines.run.flow_records import announce

@flow
def reported():
    for _ in range(200):
        announce("posttrain.eval.improved", "run", "rl", {})

server.wait()
reported()
os.kill(server._process.pid, getattr(signal, sys.argv[2]))
print("away", flush=True)
leave_soon(3)
sys.exit(3)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", ["SIGKILL", "SIGSTOP"])
def test_a_server_that_goes_away_at_the_end_holds_no_run(tmp_path: Path, number: str) -> None:
    """After the last request that would have shown it; Prefect still has events to send.

    The minute is that of the exit: what starts a server on a busy machine is not part of it.
    """
    home = prepared(tmp_path / "home")
    process = subprocess.Popen(
        [sys.executable, "-c", LATE, str(home), number],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "away\n"
        _, shown = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 3, shown
    assert "Traceback" not in shown


def test_two_that_end_a_silent_server_both_wait_for_its_end(tmp_path: Path) -> None:
    """Whichever of them goes on last ends the process, and nobody is left to end the server."""
    server = OwnServer(prepared(tmp_path / "home"))
    process = server._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    first = threading.Thread(target=server.stop)
    first.start()
    while not process.stdin.closed:  # type: ignore[union-attr]
        time.sleep(0.01)
    server.stop()
    ended = process.poll()
    first.join()
    assert ended == -signal.SIGKILL
