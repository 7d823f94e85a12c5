"""Prefect's server dies, or stops answering, in the middle of RL; what a step adds to its data."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.runtime.processes import free_ports
from tests.helpers.pipeline import (
    environment,
    journal_lines,
    prepared,
    run_command,
    start_command,
    tiny_config,
    wait_for_step,
    write_config,
)

STEPS = 100
OUTAGE_STEPS = 60
MOST_BYTES_A_STEP = 10_000
EXIT_S = 60.0
MARK = "Prefect's server does not answer"


def _config(folder: Path, *, steps: int = STEPS, checkpoint_every: int = 0) -> Path:
    """RL and an evaluation after it."""
    config = tiny_config(make_tiny_model(folder / "model"))
    rl = config["stages"]["rl"]
    rl |= {"steps": steps, "checkpoint_every": checkpoint_every, "evaluate_every": 0}
    rl |= {"inputs": {"model": "base"}, "rewards": ["accuracy"], "num_mini_batches": 1}
    rl |= {"prompts_per_step": 2}
    evaluate = {"kind": "evaluate", "inputs": {"model": "rl"}}
    config["stages"] = {"rl": rl, "evaluate": evaluate}
    return write_config(folder / "outage.yaml", config)


@pytest.mark.slow
def test_a_step_adds_ten_kilobytes_at_most(tmp_path: Path) -> None:
    home = prepared(tmp_path / "home")
    database = home / "prefect" / "prefect.db"
    before = database.stat().st_size
    done = run_command("run", str(_config(tmp_path)), "--home", str(home), "--json")
    assert done.code == 0, done.text
    with sqlite3.connect(database) as connection:
        names = [name for (name,) in connection.execute("select name from task_run")]
    assert sum(name.startswith("update_policy") for name in names) == 1
    assert {"rl", "evaluate", "steps 2 to 11", "steps 92 to 100"} <= set(names)
    assert (database.stat().st_size - before) / STEPS <= MOST_BYTES_A_STEP


class Server:
    """The Prefect server that a run reports to: its own one, or `prefect server start`."""

    def __init__(self, folder: Path) -> None:
        self.variables: dict[str, str] = {}
        self._folder = folder
        self._process: psutil.Process | None = None

    def start(self) -> None:
        """Start one that does not belong to a run."""
        home = prepared(self._folder) / "prefect"
        port = str(free_ports(1)[0])
        process = subprocess.Popen(
            [sys.executable, "-m", "prefect", "server", "start", "--port", port],
            env=environment() | {"PREFECT_HOME": str(home)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._process = psutil.Process(process.pid)
        self.variables = {"PREFECT_API_URL": f"http://127.0.0.1:{port}/api"}
        ends = time.monotonic() + 120
        while not self._answers():
            assert time.monotonic() < ends and process.poll() is None
            time.sleep(0.2)

    def of(self, run: subprocess.Popen[str]) -> None:
        """Take the server that the run has started for itself, if it has."""
        for child in psutil.Process(run.pid).children(recursive=True):
            if "posttrain.pipelines.run.prefect_program" in child.cmdline():
                self._process = child
        assert self._process is not None, "the run has no server"

    def send(self, number: signal.Signals) -> None:
        """A signal to the process and to those that it has started."""
        if self._process is None:
            return
        for process in [self._process, *self._process.children(recursive=True)]:
            process.send_signal(number)

    def delete_runs(self) -> None:
        """Delete all flow runs, as people do on its pages."""
        url = self.variables["PREFECT_API_URL"]
        with httpx.Client(trust_env=False) as client:
            for run in client.post(f"{url}/flow_runs/filter", json={}).raise_for_status().json():
                client.delete(f"{url}/flow_runs/{run['id']}")  # of a subflow, perhaps with it

    def _answers(self) -> bool:
        try:
            with httpx.Client(trust_env=False) as client:
                return client.get(f"{self.variables['PREFECT_API_URL']}/health").is_success
        except httpx.TransportError:
            return False


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path / "server")
    yield made
    try:
        made.send(signal.SIGKILL)
    except psutil.NoSuchProcess:
        pass


def _interrupted(
    server: Server, config: Path, home: Path, *, own: bool, number: signal.Signals
) -> subprocess.Popen[str]:
    """A run whose server gets a signal after some steps of training."""
    if not own:
        server.start()
    run = start_command(
        *("run", str(config), "--home", str(home), "--json"), variables=server.variables
    )
    wait_for_step(home, 8, run)
    server.of(run)
    server.send(number)
    return run


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("own", "number"),
    [
        pytest.param(True, signal.SIGKILL, id="own-killed"),
        pytest.param(True, signal.SIGSTOP, id="own-silent", marks=pytest.mark.slow),
        pytest.param(False, signal.SIGKILL, id="external-killed", marks=pytest.mark.slow),
        pytest.param(False, signal.SIGSTOP, id="external-silent", marks=pytest.mark.slow),
    ],
)
def test_a_server_that_goes_away_ends_no_run(
    server: Server, tmp_path: Path, own: bool, number: signal.Signals
) -> None:
    """It never comes back: every step is trained, the result is kept, and the process ends."""
    home = tmp_path / "home"
    config = _config(tmp_path, steps=OUTAGE_STEPS)
    run = _interrupted(server, config, home, own=own, number=number)
    said, _ = run.communicate(timeout=300)
    ended = time.time()
    assert run.returncode == 0, said
    result = json.loads(said.strip().splitlines()[-1])
    assert result["status"] == "completed"
    assert {name: stage["status"] for name, stage in result["stages"].items()} == {
        "rl": "ran",
        "evaluate": "ran",
    }
    assert all(Path(a["uri"]).exists() for s in result["stages"].values() for a in s["artifacts"])
    assert said.count(MARK) == 1, said
    assert "Traceback" not in said
    rows = [json.loads(line) for line in journal_lines(home, "rl")]
    assert [row["step"] for row in rows][-1] == OUTAGE_STEPS
    assert ended - rows[-1]["time_ms"] / 1000 < EXIT_S
    for earlier, later in zip(rows, rows[1:], strict=False):
        assert later["time_ms"] - earlier["time_ms"] < 1000 * EXIT_S, later["step"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_that_was_deleted_in_prefect_ends_well(server: Server, tmp_path: Path) -> None:
    home = tmp_path / "home"
    server.start()
    config = str(_config(tmp_path, steps=30))
    run = start_command("run", config, "--home", str(home), "--json", variables=server.variables)
    wait_for_step(home, 8, run)
    server.delete_runs()
    said, _ = run.communicate(timeout=300)
    assert run.returncode == 0, said
    result = json.loads(said.strip().splitlines()[-1])
    assert [stage["status"] for stage in result["stages"].values()] == ["ran", "ran"]
    assert said.count("Prefect's server refuses what the run reports") == 1, said
    assert "Traceback" not in said


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("own", "number"),
    [
        pytest.param(True, signal.SIGSTOP, id="own-silent", marks=pytest.mark.slow),
        pytest.param(False, signal.SIGKILL, id="external-killed", marks=pytest.mark.slow),
        pytest.param(False, signal.SIGSTOP, id="external-silent", marks=pytest.mark.slow),
    ],
)
def test_a_run_can_be_stopped_while_its_server_is_away(
    server: Server, tmp_path: Path, own: bool, number: signal.Signals
) -> None:
    """It ends within the time that a run may take, and the same command goes on."""
    home = tmp_path / "home"
    config = _config(tmp_path, steps=OUTAGE_STEPS, checkpoint_every=1)
    run = _interrupted(server, config, home, own=own, number=number)
    began = time.monotonic()
    run.send_signal(signal.SIGINT)
    said, _ = run.communicate(timeout=EXIT_S)
    assert time.monotonic() - began < EXIT_S
    assert run.returncode == 130, said
    assert "Traceback" not in said and "Crash detected" not in said
    assert "error: interrupted; the same command continues the run" in said
    if not own:  # its own server has ended with the run
        server.send(signal.SIGKILL)
    assert len(journal_lines(home, "rl")) < OUTAGE_STEPS
    done = run_command("run", str(config), "--home", str(home), "--json")
    assert done.code == 0, done.text
    assert done.result["stages"]["rl"]["status"] == "resumed"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_second_interrupt_ends_a_run_at_once(server: Server, tmp_path: Path) -> None:
    config, home = _config(tmp_path, steps=OUTAGE_STEPS), tmp_path / "home"
    run = _interrupted(server, config, home, own=False, number=signal.SIGSTOP)
    run.send_signal(signal.SIGINT)
    time.sleep(1.5)  # signals that come sooner are one request
    assert run.poll() is None, "it waits for the server"
    began = time.monotonic()
    run.send_signal(signal.SIGINT)
    said, _ = run.communicate(timeout=30)
    assert time.monotonic() - began < 3
    assert run.returncode == 130
    assert "stopped at once; the same command continues" in said
