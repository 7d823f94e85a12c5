"""The branches of a sweep as runs of a Prefect work pool: `Placement` and `Place` of them.

One thread talks to the server: it asks for runs, cancels them, reads their states and messages. A
server that is away is asked again.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.deployments.runner import RunnerDeployment
from prefect.states import Cancelled, Cancelling
from prefect.types.entrypoint import EntrypointType

from posttrain.core.errors import ConfigError
from posttrain.core.redaction import redacted_tree
from posttrain.pipelines.deploy.branch_flow import AWAY, PREFIX, sweep_branch
from posttrain.pipelines.deploy.deployments import TAGS, end_dead_here, pool_type
from posttrain.pipelines.sweep.branches import Sweep
from posttrain.pipelines.sweep.places import BranchRequest, Json, Messages, Place
from posttrain.pipelines.sweep.record import sweep_folder
from posttrain.pipelines.sweep.sweeping import SweepOptions
from posttrain.pipelines.sweep.worker import ended

MOST_AT_ONCE = 200
"""Runs whose states the server gives in one answer."""
LOOK_S = 1.0
STOP_S = 90.0
"""What a cancelled run has to end; its worker kills it after half of that."""
AWAY_S = 300.0
"""A server that has answered nothing for so long is given up."""
UNTAKEN_S = 60.0
"""A run that no worker has taken for so long is worth a warning."""
UNFINISHED = [
    *(StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING),
    *(StateType.PAUSED, StateType.CANCELLING),
]


class WorkPool:
    """The runs of one sweep in a pool. Raises `ResourceError` if it does not exist.

    Those of the same sweep that an earlier command has left are cancelled.
    """

    def __init__(
        self,
        pool: str,
        variables: Mapping[str, Any],  # Any: as the pool's template has them
        sweep: Sweep,
        options: SweepOptions,
    ) -> None:
        given = [*(c for c in sweep.configs if not isinstance(c, Path)), *sweep.overrides]
        if redacted_tree(given) != given:
            raise ConfigError(
                "the config or a value of --set holds a password or a token, which Prefect's pages "
                "would show: write it into a config file, or set it in the environment of the "
                "workers"
            )
        self.most = min(options.parallel or max(1, len(sweep.branches)), MOST_AT_ONCE)
        self.pool, self.variables = pool, {**_defaults(pool), **variables}
        self.deployment = _deployment(pool)
        self.tag = str(sweep_folder(options.home, sweep.name))
        self._places: list[PoolPlace] = []
        self._closed = threading.Event()
        self._warned = False
        end_dead_here()
        self._end_earlier()
        threading.Thread(target=self._follow, daemon=True, name="work-pool").start()

    def open(self, messages: Messages) -> Place:
        """As in `Placement`."""
        place = PoolPlace(messages)
        self._places.append(place)
        return place

    def close(self) -> None:
        """As in `Placement`."""
        self._closed.set()

    def _end_earlier(self) -> None:
        """What was submitted by a command that was killed would be at work on the same stages."""
        wanted = FlowRunFilter(
            tags=FlowRunFilterTags(all_=[self.tag]),
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=UNFINISHED)),
        )
        until = time.monotonic() + STOP_S
        with get_client(sync_client=True) as client:
            left = client.read_flow_runs(flow_run_filter=wanted)
            for run in left:
                client.set_flow_run_state(run.id, Cancelling())
            while left := client.read_flow_runs(flow_run_filter=wanted):
                if time.monotonic() > until:
                    break
                time.sleep(LOOK_S)
            for run in left:
                client.set_flow_run_state(run.id, Cancelled(), force=True)

    # -- the thread ---------------------------------------------------------------------------

    def _follow(self) -> None:
        answered = time.monotonic()
        with get_client(sync_client=True) as client:
            while not self._closed.wait(LOOK_S):
                active = [place for place in self._places if place.request is not None]
                try:
                    self._look(client, active)
                    answered = time.monotonic()
                except AWAY as error:
                    if time.monotonic() - answered > AWAY_S:
                        for place in active:
                            place.finish("failed", f"the Prefect server is away ({error})")

    def _look(self, client: SyncPrefectClient, active: list[PoolPlace]) -> None:
        for place in active:
            try:
                self._ask(client, place)
            except httpx.HTTPStatusError as error:
                if not error.response.is_client_error:
                    raise
                place.finish(
                    "failed", f"Prefect refused it: {' '.join(error.response.text.split())}"
                )
        active = [place for place in active if place.request is not None]
        ids = {place.run_id: place for place in active if place.run_id is not None}
        if not ids:
            return
        wanted = FlowRunFilter(id=FlowRunFilterId(any_=list(ids)))
        runs = {run.id: run for run in client.read_flow_runs(flow_run_filter=wanted)}
        for run_id, place in ids.items():
            if run_id not in runs:
                place.finish("failed", "its flow run was deleted")
            else:
                _read(client, runs[run_id], place)
        self._warn_if_untaken(list(runs.values()), active)

    def _ask(self, client: SyncPrefectClient, place: PoolPlace) -> None:
        """Ask for its run, or for the end of it, where that was not done yet."""
        assert place.request is not None
        if place.run_id is None:
            if place.to_cancel:
                place.finish("stopped")
                return
            place.run_id = client.create_flow_run_from_deployment(
                self.deployment,
                parameters={"request": place.request.model_dump(mode="json")},
                name=place.branch.label if place.branch is not None else None,
                tags=[*TAGS, self.tag],
                idempotency_key=place.once,
                job_variables=self.variables,
            ).id
        elif place.to_cancel and not place.was_cancelled:
            client.set_flow_run_state(place.run_id, Cancelling())
            place.was_cancelled = True

    def _warn_if_untaken(self, runs: list[FlowRun], active: list[PoolPlace]) -> None:
        waiting = [r for r in runs if r.state is not None and r.state.is_scheduled()]
        oldest = min((p.began for p in active), default=time.monotonic())
        if self._warned or len(waiting) < len(runs) or time.monotonic() - oldest < UNTAKEN_S:
            return
        self._warned = True
        text = (
            f"no worker of pool '{self.pool}' has taken a run for {UNTAKEN_S:.0f} s: start one "
            f"(`prefect worker start --pool {self.pool}`), or see what it is busy with"
        )
        active[0].messages.put((active[0], {"event": "warn", "text": text}))


class PoolPlace(Place):
    """One flow run after another."""

    def __init__(self, messages: Messages) -> None:
        super().__init__(messages)
        self.request: BranchRequest | None = None
        self.run_id: UUID | None = None
        self.once, self.began, self.num_read = "", 0.0, 0
        self.to_cancel = self.was_cancelled = False
        self.last: Json | None = None
        self._idle = threading.Event()
        self._idle.set()

    def begin(self, request: BranchRequest) -> None:
        """As in `Place`."""
        self.run_id, self.last, self.num_read = None, None, 0
        self.to_cancel = self.was_cancelled = False
        self.once, self.began = uuid.uuid4().hex, time.monotonic()
        self._idle.clear()
        self.request = request  # from here on the thread sees it

    def finish(self, status: str, reason: str = "", run: Json | None = None) -> None:
        """Report how the run ended; the place is free then."""
        self.request = None
        self.messages.put((self, {"event": "ended", **ended(status, reason, run)}))
        self._idle.set()

    def stop_run(self) -> None:
        """As in `Place`."""
        self.to_cancel = True

    def interrupt(self) -> None:
        """As in `Place`."""
        self.to_cancel = True

    def end(self) -> None:
        """As in `Place`."""
        self._idle.wait(STOP_S)

    def kill(self) -> None:
        """As in `Place`: on the server; a flow that goes on finds that nobody reads it."""
        if not self._idle.is_set() and self.run_id is not None:
            with contextlib.suppress(*AWAY), get_client(sync_client=True) as client:
                client.set_flow_run_state(self.run_id, Cancelled(), force=True)

    def how_it_ended(self) -> str:
        """As in `Place`."""
        return "its flow run ended"


def _read(client: SyncPrefectClient, run: FlowRun, place: PoolPlace) -> None:
    """Pass on the messages of a run, and how it ended."""
    state = run.state
    if state is None or state.is_scheduled():
        return
    while items := client.filter_flow_run_input(run.id, PREFIX, 50, set()):
        for item in sorted(items, key=lambda one: one.key):
            number = int(item.key.removeprefix(PREFIX))
            if number >= place.num_read:  # else it was not removed when it was read
                place.num_read = number + 1
                for message in json.loads(item.value):
                    _pass_on(message, place)
            client.delete_flow_run_input(run.id, item.key)
    if not state.is_final():
        return
    last = place.last
    if last is not None and last["status"] != "stopped":
        place.finish(last["status"], last["reason"], last["run"])
    elif state.is_cancelled():
        reason = "" if place.to_cancel else f"its flow run '{run.name}' was cancelled in Prefect"
        place.finish("stopped" if place.to_cancel else "failed", reason)
    else:
        said = f": {state.message}" if state.message else ""
        place.finish("failed", f"its flow run '{run.name}' ended as {state.name}{said}")


def _pass_on(message: Json, place: PoolPlace) -> None:
    if message["event"] == "ended":
        place.last = message
    else:
        place.messages.put((place, message))


def _deployment(pool: str) -> UUID:
    """The deployment of branches to a pool, which all sweeps share."""
    made = RunnerDeployment.from_flow(
        sweep_branch,
        pool,
        description=sweep_branch.description,
        tags=TAGS,
        work_pool_name=pool,
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    return UUID(str(made.apply()))


def _defaults(pool: str) -> dict[str, str]:
    """What jobs get: paths in a config are relative to where the command runs."""
    return {"working_dir": str(Path.cwd())} if pool_type(pool) == "process" else {}
