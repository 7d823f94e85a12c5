"""`posttrain ui` with real servers, and the child processes it starts and stops."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from posttrain.core.errors import ResourceError
from posttrain.core.runtime.process_guard import GRACE_S
from posttrain.core.runtime.processes import free_ports
from posttrain.pipelines.cli.ui import Server, ServerSpec, stop_all
from posttrain.pipelines.services.listening import answers


def spec(folder: Path, command: list[str], port: int) -> ServerSpec:
    health = (f"http://127.0.0.1:{port}/",)
    return ServerSpec("test", command, dict(os.environ), port, "--port", health, folder / "log")


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + 20
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return path.read_text()


def test_a_server_is_waited_for_and_stopped(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
    server = Server(spec(tmp_path, command, port))
    server.wait_until_ready(20)
    assert answers(f"http://127.0.0.1:{port}/")
    stop_all([server])
    assert server.exit_code is not None
    assert not answers(f"http://127.0.0.1:{port}/")


def test_a_server_that_ends_by_itself_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no database')"]
    server = Server(spec(tmp_path, command, free_ports(1)[0]))
    with pytest.raises(ResourceError, match="exit code 1.*ends with: no database"):
        server.wait_until_ready(20)


def test_a_stubborn_server_and_its_children_are_killed(tmp_path: Path) -> None:
    program = (
        "import signal, subprocess, sys, time, pathlib\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal, time\\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\\ntime.sleep(60)'])\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    server = Server(spec(tmp_path, [sys.executable, "-c", program], free_ports(1)[0]))
    child = int(wait_for(tmp_path / "pid"))
    began = time.monotonic()
    stop_all([server])
    assert time.monotonic() - began < GRACE_S + 3
    deadline = time.monotonic() + 5
    while is_alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_both_pages_answer_an_artifact_can_be_seen_and_ctrl_c_stops_all(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    from posttrain.core.tracking.mlflow_store import artifact_root, prepare_database

    home = tmp_path / "home"
    uri = prepare_database(home)
    root = artifact_root(uri)
    assert root is not None
    client = MlflowClient(tracking_uri=uri)
    experiment = client.create_experiment("e", artifact_location=root.as_uri())
    run = client.create_run(experiment)
    client.log_text(run.info.run_id, "seen through the page", "note.txt")
    mlflow, prefect = free_ports(2)
    command = [sys.executable, "-m", "posttrain.pipelines.cli", "ui", "--home", str(home)]
    command += ["--mlflow-port", str(mlflow), "--prefect-port", str(prefect)]
    shown = tmp_path / "shown"
    with shown.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 240
        while "Ctrl-C" not in shown.read_text():
            assert process.poll() is None, shown.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        page = f"http://127.0.0.1:{mlflow}/get-artifact?path=note.txt&run_uuid={run.info.run_id}"
        with urllib.request.urlopen(page, timeout=30) as response:
            assert response.read() == b"seen through the page"
        with urllib.request.urlopen(
            f"http://127.0.0.1:{prefect}/ui-settings", timeout=30
        ) as answer:
            assert f"127.0.0.1:{prefect}/api" in answer.read().decode()
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert time.monotonic() - began < 12
    finally:
        process.kill()
        process.wait()
    for port in (mlflow, prefect):
        assert not answers(f"http://127.0.0.1:{port}/")


@pytest.mark.slow
def test_ui_check_starts_both_sees_them_answer_and_ends_with_0(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "posttrain.pipelines.cli", "ui", "--check"]
    command += ["--home", str(tmp_path), "--mlflow-port", str(free_ports(1)[0])]
    command += ["--prefect-port", str(free_ports(1)[0]), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert '"status": "ok"' in done.stdout.splitlines()[-1]
