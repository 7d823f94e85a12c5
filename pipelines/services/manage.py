"""`up`, `down` and `status` of the services of one home."""

from __future__ import annotations

import importlib.util
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from posttrain.core.errors import ResourceError
from posttrain.pipelines.services.layout import Layout, Ports, exports
from posttrain.pipelines.services.listening import HOST, check_port
from posttrain.pipelines.services.postgres import Cluster
from posttrain.pipelines.services.processes import (
    find,
    last_line,
    marked,
    signal_all,
    start,
    wait_gone,
)
from posttrain.pipelines.services.servers import (
    Service,
    end_dead_runs,
    make_pool,
    mlflow_server,
    prefect_server,
    runs_in_progress,
    worker,
    worker_name,
)

START_SECONDS = 240.0
STOP_SECONDS = 60.0
"""What a running pipeline has to stop at a safe point, and a server to close its connections."""
TELL_SECONDS = 30.0
"""What a worker has to report how its runs ended."""
TELL_EVERY_S = 10.0
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class State:
    service: str
    pid: int | None
    ready: bool
    address: str
    log: Path


def services(layout: Layout, ports: Ports) -> list[Service]:
    cluster = Cluster(layout, ports.postgres)
    database = Service(cluster.launch(), cluster.is_ready, f"{HOST}:{ports.postgres}")
    return [
        database,
        prefect_server(layout, ports),
        mlflow_server(layout, ports),
        worker(layout, ports),
    ]


def up(home: Path, wanted: Ports, say: Say) -> Ports:
    """Start what does not run, and return when all of it answers; returns the ports."""
    if importlib.util.find_spec("psycopg2") is None:
        raise ResourceError(
            "MLflow needs psycopg2 to keep its data in PostgreSQL: pip install psycopg2-binary "
            "(or posttrain[server])"
        )
    layout = Layout(home)
    with layout.locked():
        cluster = Cluster(layout, wanted.postgres)
        database, *others = services(layout, wanted)
        down = [s for s in (database, *others) if find(s.launch.record) is None]
        _check_ports(layout, wanted, [service.launch.service for service in down])
        layout.keep_ports(wanted)
        cluster.prepare()
        try:
            _start([database], layout, say)
            cluster.make_databases()
            # The servers migrate their databases at the same time, which takes the most time.
            _start(others[:2], layout, say)
            make_pool(wanted)
            ended = end_dead_runs(exports(wanted)["PREFECT_API_URL"], worker_name(layout))
            if ended:
                say(f"{'runs':<9} {ended} whose process was killed: reported as crashed")
            _start(others[2:], layout, say)
        except BaseException:
            stop(layout, [s.launch.service for s in down], say)
            raise
    return wanted


def _check_ports(layout: Layout, wanted: Ports, down: list[str]) -> None:
    kept = layout.ports()
    for service, option in (
        ("postgres", "PostgreSQL"),
        ("prefect", "Prefect"),
        ("mlflow", "MLflow"),
    ):
        port = int(getattr(wanted, service))
        if service in down:
            check_port(port, f"--{service}-port", option)
        elif kept is not None and getattr(kept, service) != port:
            raise ResourceError(
                f"{option} runs on port {getattr(kept, service)}: `posttrain services down` first, "
                f"then --{service}-port {port}"
            )


def _start(chosen: list[Service], layout: Layout, say: Say) -> None:
    """Start those that do not run, and wait until all of them answer."""
    began = time.monotonic()
    for service in chosen:
        if find(service.launch.record) is None:
            say(f"{service.launch.service:<9} starting; log: {service.launch.log}")
            start(service.launch, layout.folder)
    for service in chosen:
        _wait(service, began, say)


def _wait(service: Service, began: float, say: Say) -> None:
    launch = service.launch
    reported = time.monotonic()
    while not service.is_ready():
        if find(launch.record) is None:
            raise ResourceError(
                f"{launch.service} ended while it started; its log {launch.log} ends with: "
                f"{last_line(launch.log)}"
            )
        if time.monotonic() - began > START_SECONDS:
            raise ResourceError(
                f"{launch.service} does not answer after {START_SECONDS:.0f} s; its log "
                f"{launch.log} ends with: {last_line(launch.log)}"
            )
        if time.monotonic() - reported > TELL_EVERY_S:
            reported = time.monotonic()
            say(f"{launch.service:<9} still starting after {reported - began:.0f} s")
        time.sleep(0.2)
    say(f"{launch.service:<9} ready at {service.address} ({time.monotonic() - began:.1f} s)")


def down(home: Path, say: Say) -> None:
    """Stop everything that `up` started and what that started; returns when nothing is left."""
    layout = Layout(home)
    if not layout.folder.is_dir():
        say(f"no services in {home}")
        return
    with layout.locked():
        stop(layout, ["worker", "mlflow", "prefect", "postgres"], say)


def stop(layout: Layout, names: list[str], say: Say) -> None:
    """End these services: the worker with its runs first, the database last."""
    order = [name for name in ("worker", "mlflow", "prefect", "postgres") if name in names]
    for name in order:
        record = layout.record(name)
        process = find(record)
        if process is None:
            record.unlink(missing_ok=True)
            continue
        say(f"{name:<9} stopping")
        if name == "worker":
            _stop_runs(process, layout, say)
        family = [process, *process.children(recursive=True)]
        signal_all([process], signal.SIGINT if name == "postgres" else signal.SIGTERM)
        _end(wait_gone(family, STOP_SECONDS))
        record.unlink(missing_ok=True)
    if set(order) == {"worker", "mlflow", "prefect", "postgres"}:
        _end_orphans(layout, say)


def _stop_runs(worker: psutil.Process, layout: Layout, say: Say) -> None:
    """Stop the worker's runs at a safe point; it would kill them when it ends itself."""
    runs = worker.children()
    if not runs:
        return
    say(f"{'worker':<9} waiting for {len(runs)} run(s) to stop at a safe point")
    family = worker.children(recursive=True)
    signal_all(runs, signal.SIGTERM)
    wait_gone(family, STOP_SECONDS)
    # The worker tells the server how they ended; ended itself, it would leave them running there.
    ports, deadline = layout.ports(), time.monotonic() + TELL_SECONDS
    while ports is not None and runs_in_progress(ports) and time.monotonic() < deadline:
        time.sleep(0.3)


def _end_orphans(layout: Layout, say: Say) -> None:
    """Runs that a killed worker left behind are stopped as it would have stopped them."""
    left = marked(layout.folder)
    if not left:
        return
    say(f"{'orphans':<9} stopping {len(left)} processes that a service left behind")
    signal_all(left, signal.SIGTERM)
    _end(wait_gone(left, STOP_SECONDS))


def _end(left: list[psutil.Process]) -> None:
    signal_all(left, signal.SIGKILL)
    wait_gone(left, 10)


def status(home: Path) -> list[State]:
    """Every service; empty when none was ever started. Changes nothing."""
    layout = Layout(home)
    ports = layout.ports()
    if ports is None:
        return []
    states = []
    for service in services(layout, ports):
        process = find(service.launch.record)
        ready = process is not None and service.is_ready()
        states.append(
            State(
                service.launch.service,
                None if process is None else process.pid,
                ready,
                service.address,
                service.launch.log,
            )
        )
    return states
