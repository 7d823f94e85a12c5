"""Deployments of the flows in `deployed.py`: to a work pool, or served by this process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
from prefect.client.schemas.schedules import construct_schedule
from prefect.deployments.runner import RunnerDeployment
from prefect.exceptions import ObjectNotFound, TerminationSignal
from prefect.runner import Runner
from prefect.schedules import Cron, Schedule
from prefect.settings import get_current_settings
from prefect.types.entrypoint import EntrypointType

from posttrain.core.errors import ConfigError, ResourceError, nearest
from posttrain.core.redaction import address, redacted_tree
from posttrain.pipelines.deploy import flows as deployed
from posttrain.pipelines.deploy.forms import RunRequest
from posttrain.pipelines.services.servers import end_dead_runs
from posttrain.pipelines.services.shared_servers import api_headers

FLOWS: dict[str, Flow[..., Any]] = {
    "train": deployed.train,
    "evaluate": deployed.evaluate,
    "continual": deployed.continual,
}


DEAD_RUNS_EVERY_S = 60.0
ENDS_ITSELF_S, STOPS_S = 10.0, 30.0
"""How long a run may go on after its server was interrupted, and how long after SIGTERM."""
TAGS = ["posttrain"]
# A run that falls due while another one goes on is left out.
ONE_AT_A_TIME = ConcurrencyLimitConfig(
    limit=1, collision_strategy=ConcurrencyLimitStrategy.CANCEL_NEW
)


@dataclass(frozen=True, slots=True)
class Wanted:
    flow: str
    name: str
    request: RunRequest
    cron: str | None = None
    timezone: str | None = None
    job_variables: Mapping[str, Any] = field(default_factory=dict)


def check(wanted: Wanted) -> None:
    """Raises `ConfigError` for a flow or a schedule that there is not."""
    flow_named(wanted.flow)
    parameters = _parameters(wanted)
    if redacted_tree(parameters) != parameters:
        raise ConfigError(
            "a value of --set holds a password or a token, which Prefect's pages would show: write "
            "it into the config file, or set it in the environment of the worker"
        )
    if wanted.cron is None:
        if wanted.timezone is not None:
            raise ConfigError("--timezone is of a schedule, and there is none: add --cron")
        return
    cron, timezone = wanted.cron, wanted.timezone
    try:
        construct_schedule(cron=cron, timezone=timezone)
    except ValueError as error:
        problem = str(error).splitlines()[-1].strip()
        raise ConfigError(
            f"--cron '{cron}' (timezone {timezone or 'UTC'}) is not a schedule: {problem}; five "
            "fields are expected, such as '0 2 * * *' for two o'clock each night"
        ) from error


def flow_named(name: str) -> Flow[..., Any]:
    """The flow of that name. Raises `ConfigError` with those there are."""
    if name not in FLOWS:
        raise ConfigError(f"no flow '{name}'{nearest(name, FLOWS)} (flows: {', '.join(FLOWS)})")
    return FLOWS[name]


def _schedule(wanted: Wanted) -> Schedule | None:
    return None if wanted.cron is None else Cron(wanted.cron, timezone=wanted.timezone or "UTC")


def _parameters(wanted: Wanted) -> dict[str, Any]:
    return {"request": wanted.request.model_dump(mode="json", exclude_defaults=True)}


def deploy(wanted: Wanted, pool: str) -> str:
    """Make or change the deployment; returns its page. Raises `ResourceError` without the pool."""
    flow = flow_named(wanted.flow)
    end_dead_here()
    variables = dict(wanted.job_variables)
    if pool_type(pool) == "process":
        # Paths in a config are relative to where the command runs; elsewhere the image decides.
        variables.setdefault("working_dir", str(Path.cwd()))
    made = RunnerDeployment.from_flow(
        flow,
        wanted.name,
        schedule=_schedule(wanted),
        parameters=_parameters(wanted),
        description=flow.description,
        tags=TAGS,
        concurrency_limit=ONE_AT_A_TIME,
        work_pool_name=pool,
        job_variables=variables or None,
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    return f"{address(get_current_settings().ui_url or '')}/deployments/deployment/{made.apply()}"


def pool_type(pool: str) -> str:
    """The type of a pool. Raises `ResourceError` if the pool does not exist."""
    with get_client(sync_client=True) as client:
        try:
            return client.read_work_pool(pool).type
        except ObjectNotFound:
            known = [item.name for item in client.read_work_pools()]
    raise ResourceError(
        f"no work pool '{pool}' on the server{nearest(pool, known)} (pools: "
        f"{', '.join(known) or 'none'}); `posttrain services up` makes the pool of its worker, "
        f"`prefect work-pool create {pool} --type process` another one"
    )


def serve(wanted: Wanted) -> None:
    """Serve the deployment until interrupted; each run is a process of its own."""
    flow = flow_named(wanted.flow)
    logging.getLogger("prefect.runner.process_manager").addFilter(_is_news)
    threading.Thread(target=_keep_ending_dead_runs, daemon=True, name="dead-runs").start()
    runner = _Runner(wanted.name, limit=1)
    runner.add_flow(
        flow,
        wanted.name,
        schedule=_schedule(wanted),
        parameters=_parameters(wanted),
        description=flow.description,
        tags=TAGS,
        concurrency_limit=ONE_AT_A_TIME,
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    with contextlib.suppress(KeyboardInterrupt, TerminationSignal):
        asyncio.run(runner.start())


class _Runner(Runner):
    """Prefect's, which ends its runs when it ends.

    Prefect's own waits for the process of a run for as long as the run takes, hours perhaps, where
    the interrupt did not reach that process too: one of `kill` or of a service manager does not.
    """

    async def __aexit__(self, *exc_info: Any) -> None:
        runs = [psutil.Process(run.pid) for run in multiprocessing.active_children()]
        # A thread, since Prefect waits for the processes in this call.
        threading.Thread(target=_end, args=(runs,), daemon=True, name="end-runs").start()
        await super().__aexit__(*exc_info)


def _end(runs: Sequence[psutil.Process]) -> None:
    """Leave processes time to end by themselves, as after Ctrl-C in a terminal; then end them."""
    for seconds, number in ((ENDS_ITSELF_S, signal.SIGTERM), (STOPS_S, signal.SIGKILL)):
        deadline = time.monotonic() + seconds
        # No wait of psutil's: it would take the exit code that Prefect waits for.
        while any(run.is_running() for run in runs) and time.monotonic() < deadline:
            time.sleep(0.2)
        for run in runs:
            with contextlib.suppress(psutil.NoSuchProcess):
                run.send_signal(number)


def _keep_ending_dead_runs() -> None:
    """What a killed `serve` left running, or a run that died while the server was away."""
    while True:
        end_dead_here()
        time.sleep(DEAD_RUNS_EVERY_S)


def end_dead_here() -> None:
    """Report runs of this machine whose process is gone as crashed."""
    with contextlib.suppress(httpx.HTTPError):  # the server is away: the next time
        end_dead_runs(get_current_settings().api.url or "", headers=api_headers())


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a line is worth reading: at its end Prefect fails to kill runs that have ended."""
    return not (record.exc_info and isinstance(record.exc_info[1], ProcessLookupError))
