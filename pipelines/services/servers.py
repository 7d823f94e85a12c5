"""How the Prefect server, the MLflow server and the worker are started, and when they are ready.

None of them is given the database's password: PostgreSQL's client libraries read it from its file.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus
from typing import Any

import httpx
import psutil

from posttrain.core.errors import ResourceError
from posttrain.core.runtime.processes import is_left_behind
from posttrain.pipelines.services.layout import POOL, Layout, Ports, exports, plain_environment
from posttrain.pipelines.services.listening import HOST, answers
from posttrain.pipelines.services.postgres import ROLE
from posttrain.pipelines.services.processes import MARK, Launch, find

FILES = "prefect.server.concurrency.lease_storage.filesystem"
PROCESS = "posttrain.process"
"""Label of a deployed run: its process, as `owner` gives it."""
PROCESS_STATE = "posttrain.process.state"
"""Label of a deployed run: the id of the state in which that process runs it."""
NO_LOGIN: Mapping[str, str] = {}
UNFINISHED = ["RUNNING", "PENDING", "CANCELLING"]
QUIET = {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}


@dataclass(frozen=True, slots=True)
class Service:
    """A process and how its readiness is seen."""

    launch: Launch
    is_ready: Callable[[], bool]
    address: str


def prefect_server(layout: Layout, ports: Ports) -> Service:
    base = f"http://{HOST}:{ports.prefect}"
    database = f"postgresql+asyncpg://{ROLE}@{HOST}:{ports.postgres}/prefect"
    environment = {
        **plain_environment(),
        **QUIET,
        "PREFECT_HOME": str(layout.folder / "prefect"),
        "PREFECT_API_URL": f"{base}/api",
        "PREFECT_UI_API_URL": f"{base}/api",
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": database,
        "PREFECT_SERVER_DATABASE_DRIVER": "postgresql+asyncpg",
        # In memory, as by default, a killed server forgets who holds a slot: it is never released.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": FILES,
        "PGPASSFILE": str(layout.password_file),
    }
    command = [sys.executable, "-m", "prefect", "server", "start"]
    launch = Launch(
        "prefect",
        [*command, "--host", HOST, "--port", str(ports.prefect)],
        environment,
        layout.log("prefect"),
        layout.record("prefect"),
    )
    return Service(launch, lambda: answers(f"{base}/api/health"), base)


def mlflow_server(layout: Layout, ports: Ports) -> Service:
    """Tracking, registry and artifacts: clients send files to it, and need no folder in common."""
    base = f"http://{HOST}:{ports.mlflow}"
    environment = {
        **plain_environment(),
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "1",
        "PGPASSFILE": str(layout.password_file),
    }
    database = f"postgresql+psycopg2://{ROLE}@{HOST}:{ports.postgres}/mlflow"
    artifacts = layout.folder / "mlflow" / "artifacts"
    command = [
        *(sys.executable, "-m", "mlflow", "server", "--backend-store-uri", database),
        *("--serve-artifacts", "--artifacts-destination", artifacts.as_uri()),
        *("--workers", "1", "--host", HOST, "--port", str(ports.mlflow)),
    ]
    launch = Launch("mlflow", command, environment, layout.log("mlflow"), layout.record("mlflow"))
    return Service(launch, lambda: answers(f"{base}/health"), base)


def worker(layout: Layout, ports: Ports) -> Service:
    """Takes runs of the pool, each in a process of its own, which uses this home."""
    name = worker_name(layout)
    environment = {
        "PREFECT_WORKER_QUERY_SECONDS": "5",
        **plain_environment(),
        **QUIET,
        **exports(ports),
        "PREFECT_HOME": str(layout.folder / "worker"),
        "POSTTRAIN_HOME": str(layout.home),
    }
    command = [
        *(sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL),
        *("--type", "process", "--name", name, "--install-policy", "never"),
    ]
    launch = Launch("worker", command, environment, layout.log("worker"), layout.record("worker"))
    return Service(launch, lambda: _is_online(launch, ports, name), f"pool '{POOL}'")


def worker_name(layout: Layout) -> str:
    return f"{socket.gethostname()}-{layout.home.name.lstrip('.')}"


def make_pool(ports: Ports) -> None:
    """Make the worker's pool if there is none: one run at a time, as each takes the whole machine.

    The limit is the pool's and not the worker's: a worker with a limit of its own dies when a
    suspended run is resumed before its process has ended (Prefect 3.7.4). Who has changed it keeps
    what was set.
    """
    made = {"name": POOL, "type": "process", "concurrency_limit": 1}
    answer = _post(_api(ports), "/work_pools/", made, timeout=30)
    if answer.is_error and answer.status_code != HTTPStatus.CONFLICT:
        raise ResourceError(f"the Prefect server could not make a work pool: {answer.text}")


def _is_online(launch: Launch, ports: Ports, name: str) -> bool:
    """Whether the server has heard of this worker, and not only of one before it."""
    process = find(launch.record)
    found = _ask(_api(ports), f"/work_pools/{POOL}/workers/filter", {})
    return process is not None and any(
        item["name"] == name
        and item["status"] == "ONLINE"
        and datetime.fromisoformat(item["last_heartbeat_time"]).timestamp() > process.create_time()
        for item in found
    )


def runs_in_progress(ports: Ports) -> int:
    """How many runs of the pool the server believes to be running; 0 where it does not answer."""
    state = {"state": {"type": {"any_": ["RUNNING"]}}}
    chosen = {"flow_runs": state, "work_pools": {"name": {"any_": [POOL]}}}
    return len(_ask(_api(ports), "/flow_runs/filter", chosen))


def end_dead_runs(url: str, worker: str = "", headers: Mapping[str, str] = NO_LOGIN) -> int:
    """Report runs of this machine whose process is gone as crashed; returns how many.

    A run that was killed together with its server, its worker or its `serve` stays "Running" there
    and keeps the slots of its deployment and pool, for which each later run of a schedule is
    cancelled. A run says itself which process it is (`PROCESS`); of one that had not come to that
    the worker named `worker` has noted the process. `headers` let it into a server with a login.
    """
    chosen = {"flow_runs": {"state": {"type": {"any_": UNFINISHED}}}}
    found = _ask(url, "/flow_runs/filter", chosen, headers)
    dead = [run for run in found if _process_is_gone(run, worker)]
    crashed = {"type": "CRASHED", "name": "Crashed", "message": "its process was killed"}
    return sum(
        _post(
            url,
            f"/flow_runs/{run['id']}/set_state",
            {"state": crashed, "force": True},
            timeout=30,
            headers=headers,
        ).is_success
        for run in dead
    )


def _process_is_gone(run: dict[str, Any], worker: str) -> bool:
    labels = run.get("labels") or {}
    # A run that was resumed has the label of an earlier process until it says its own.
    if PROCESS in labels and labels.get(PROCESS_STATE) == run.get("state_id"):
        return is_left_behind(str(labels[PROCESS]))
    number = str(run.get("infrastructure_pid") or "").rpartition(":")[2]
    mine = bool(worker) and labels.get("prefect.worker.name") == worker
    return mine and number.isdecimal() and not _is_run(int(number))


def _is_run(pid: int) -> bool:
    """Whether `pid` is a live process of a run; the kernel gives numbers to others again."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return MARK in process.environ()
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True  # it cannot be seen: nothing is known


def _api(ports: Ports) -> str:
    return exports(ports)["PREFECT_API_URL"]


def _ask(url: str, path: str, body: object, headers: Mapping[str, str] = NO_LOGIN) -> list[Any]:
    """What the Prefect server answers to a filter; nothing where it does not answer."""
    try:
        answer = _post(url, path, body, timeout=5, headers=headers)
        return list(answer.raise_for_status().json())
    except (httpx.HTTPError, ValueError):
        return []


def _post(
    url: str, path: str, body: object, timeout: float, headers: Mapping[str, str] = NO_LOGIN
) -> httpx.Response:
    # Proxies of the environment must not see requests to this machine.
    return httpx.post(f"{url}{path}", json=body, timeout=timeout, headers=headers, trust_env=False)
