"""Runs that the server believes to be running although their process was killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from prefect.context import use_profile
from prefect.settings import Profile

from posttrain.core.runtime.processes import Owner, owner
from posttrain.pipelines.deploy.deployments import end_dead_here
from posttrain.pipelines.services import servers
from posttrain.pipelines.services.layout import Layout
from posttrain.pipelines.services.processes import MARK
from posttrain.pipelines.services.shared_servers import require_shared_prefect


def test_only_runs_whose_process_is_gone_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = [sys.executable, "-c", "input()"]
    live = subprocess.Popen(
        program, stdin=subprocess.PIPE, env={**os.environ, MARK: "folder"}, text=True
    )
    gone = subprocess.Popen(program, stdin=subprocess.PIPE)
    gone.communicate(b"\n")
    other = subprocess.Popen(program, stdin=subprocess.PIPE, env={})  # the number is used again
    pids = {
        "live": str(live.pid),
        "gone": str(gone.pid),
        "other": str(other.pid),
        "elsewhere": str(gone.pid),
        "none": None,
    }
    sent: list[tuple[str, Any]] = []

    def post(url: str, path: str, body: Any, timeout: float, headers: Any) -> SimpleNamespace:
        sent.append((path, body))
        return SimpleNamespace(is_success=True)

    layout = Layout(tmp_path / ".posttrain")
    workers = dict.fromkeys(pids, servers.worker_name(layout)) | {"elsewhere": "another-home"}
    found = [
        {"id": name, "infrastructure_pid": pid, "labels": {"prefect.worker.name": workers[name]}}
        for name, pid in pids.items()
    ]
    # A run says itself which process it is, in the state that it has then.
    dead = str(replace(Owner.this(), pid=gone.pid))
    for name, said, state in (
        ("said", dead, "s1"),
        ("said-live", owner(), "s1"),
        ("resumed", dead, "s0"),
    ):
        labels = {servers.PROCESS: said, servers.PROCESS_STATE: state}
        found.append({"id": name, "state_id": "s1", "labels": labels})
    monkeypatch.setattr(servers, "_ask", lambda *arguments: found)
    monkeypatch.setattr(servers, "_post", post)
    try:
        assert servers.end_dead_runs("http://x/api", servers.worker_name(layout)) == 3
    finally:
        for process in (live, other):
            process.kill()
            process.wait()
    assert [path for path, _ in sent] == [
        "/flow_runs/gone/set_state",
        "/flow_runs/other/set_state",
        "/flow_runs/said/set_state",
    ]
    assert all(body["force"] and body["state"]["type"] == "CRASHED" for _, body in sent)


@pytest.mark.slow
def test_a_lease_that_cannot_be_renewed_ends_no_deployed_run() -> None:
    """Prefect's own lease cancels what runs inside after three attempts."""
    code = (
        "import time, uuid\n"
        "import posttrain.pipelines.deploy.flows\n"
        "from prefect import flow_engine\n"
        "with flow_engine.maintain_concurrency_lease(\n"
        "    uuid.uuid4(), 0.2, raise_on_lease_renewal_failure=True\n"
        "):\n"
        "    time.sleep(12)\n"
        "print('went on')\n"
    )
    nowhere = {"PREFECT_API_URL": "http://127.0.0.1:9/api", "PREFECT_CLIENT_MAX_RETRIES": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | nowhere,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.stdout.endswith("went on\n"), done.stderr
    assert "slots are no longer reserved" in done.stderr


class WithALogin(BaseHTTPRequestHandler):
    """A Prefect server that wants a login, with one run whose process is gone."""

    login = ""
    run: ClassVar[dict[str, Any]] = {}
    ended: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status, answer = 200, json.dumps({"server": {"database": {"driver": "postgresql"}}})
        if self.headers.get("Authorization") != self.login:
            status = 401
        elif self.path.endswith("/filter"):
            answer = json.dumps([self.run])
        elif self.path.endswith("/set_state"):
            self.ended.append(self.path)
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer.encode())

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.mark.parametrize(
    ("variable", "value", "login"),
    [
        ("PREFECT_API_AUTH_STRING", "admin:pass", "Basic YWRtaW46cGFzcw=="),
        ("PREFECT_API_KEY", "pnu_key", "Bearer pnu_key"),
    ],
)
def test_a_server_with_a_login_is_asked_as_prefect_asks_it(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, login: str
) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    said = {servers.PROCESS: str(replace(Owner.this(), pid=gone.pid))}
    run = {"id": "dead", "state_id": "s1", "labels": said | {servers.PROCESS_STATE: "s1"}}
    monkeypatch.setattr(WithALogin, "run", run)
    monkeypatch.setattr(WithALogin, "login", login)
    monkeypatch.setattr(WithALogin, "ended", [])
    with ThreadingHTTPServer(("127.0.0.1", 0), WithALogin) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/api"
        monkeypatch.setenv("PREFECT_API_URL", url)
        monkeypatch.setenv(variable, value)
        with use_profile(Profile(name="test"), include_current_context=False):
            assert require_shared_prefect() == url
            end_dead_here()
        server.shutdown()
    assert WithALogin.ended == ["/api/flow_runs/dead/set_state"]
