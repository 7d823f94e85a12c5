"""The flow of one branch of a sweep, and the way its messages go to the sweep.

They go as inputs of the flow run, which the sweep reads and removes: nothing listens, and no folder
is in common. A flow whose messages nobody reads has lost its sweep, and ends. Annotations here are
types, not strings: Prefect checks parameters against them.
"""

import json
import signal
import threading
import time
from http import HTTPStatus
from types import TracebackType
from typing import Self
from uuid import UUID

import httpx
from prefect import flow, get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.exceptions import PrefectException, TerminationSignal
from prefect.logging import get_run_logger
from prefect.states import Cancelled, Failed

from posttrain.core.errors import PosttrainError
from posttrain.core.redaction import redact_output, redacted
from posttrain.pipelines.deploy.flows import note_process
from posttrain.pipelines.run.progress import LogReporter
from posttrain.pipelines.services.shared_servers import require_shared_mlflow
from posttrain.pipelines.sweep.places import BranchRequest, Json
from posttrain.pipelines.sweep.worker import run_branch

PREFIX = "sweep-"
"""Of the keys of messages; the rest is their number."""
SEND_S, SIGN_S = 1.0, 15.0
"""How often messages are sent, and how often a sign of life where there are none."""
UNREAD_S = 120.0
"""A sweep that has left a message unread for so long is gone."""
LAST_S = 30.0
"""How long a flow that has ended waits for a server that is away."""
AWAY = (httpx.HTTPError, OSError, PrefectException)


@flow(name="sweep_branch", persist_result=False)
def sweep_branch(request: BranchRequest) -> State[None] | None:
    """Run one branch of a sweep: a variant with a seed. The sweep follows it."""
    redact_output()
    note_process()
    context = FlowRunContext.get()
    assert context is not None and context.flow_run is not None
    stop = threading.Event()
    with Mailbox(context.flow_run.id, stop) as mailbox:
        try:
            require_shared_mlflow()
        except PosttrainError as error:
            last = {"status": "failed", "reason": str(error), "run": None}
        else:
            reporter = LogReporter(get_run_logger())
            last = run_branch(request, mailbox.send, stop, also=[reporter])
        mailbox.send("ended", **last)
    if last["status"] == "failed":
        get_run_logger().error(last["reason"])
        return Failed(message=last["reason"])
    if mailbox.is_unread:
        return Cancelled(message="the sweep that asked for this run is gone")
    if last["status"] == "stopped":
        raise TerminationSignal(signal.SIGTERM)
    return None


class Mailbox:
    """Sends messages to the sweep until the end of the block; sets `stop` where nobody reads."""

    def __init__(self, run_id: UUID, stop: threading.Event) -> None:
        self.is_unread = False
        self._run_id, self._stop = run_id, stop
        self._waiting: list[Json] = []
        self._batch: list[Json] = []  # is on its way
        self._sent: dict[str, float] = {}
        self._lock, self._over = threading.Lock(), threading.Event()
        self._client = get_client(sync_client=True)
        self._thread = threading.Thread(target=self._work, daemon=True, name="mailbox")

    def send(self, event: str, **values: object) -> None:
        """Add a message; of steps that wait only the last is kept."""
        message = {"event": event, **values}
        with self._lock:
            if event == "step" and self._waiting and self._waiting[-1]["event"] == "step":
                self._waiting.pop()
            self._waiting.append(message)

    @property
    def _has_more(self) -> bool:
        return bool(self._waiting or self._batch)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join(LAST_S)

    def _work(self) -> None:
        looked = signed = time.monotonic()
        ends = float("inf")
        with self._client as client:
            while True:
                over = self._over.wait(SEND_S)
                now = time.monotonic()
                ends = min(ends, now + LAST_S) if over else ends
                try:
                    if self._has_more or (now - signed > SIGN_S and not over):
                        self._post(client)
                        signed = now
                    if now - looked > SIGN_S and not over:
                        self._look(client)
                        looked = now
                except AWAY:
                    if over:
                        time.sleep(SEND_S)
                if over and (not self._has_more or now > ends):
                    return

    def _post(self, client: SyncPrefectClient) -> None:
        with self._lock:
            if not self._batch:
                self._batch, self._waiting = self._waiting, []
        key = f"{PREFIX}{len(self._sent):08}"
        value = redacted(json.dumps(self._batch, default=str))
        try:
            client.create_flow_run_input(self._run_id, key, value)
        except httpx.HTTPStatusError as error:
            if error.response.status_code == HTTPStatus.NOT_FOUND:  # somebody deleted the run
                self._end_unread()
            # With a conflict the server has it, and its answer was lost.
            if error.response.status_code != HTTPStatus.CONFLICT:
                raise
        self._sent[key] = time.monotonic()
        self._batch = []

    def _look(self, client: SyncPrefectClient) -> None:
        """End the run where the oldest message that was not read is old."""
        unread = client.filter_flow_run_input(self._run_id, PREFIX, 1, set())
        since = min((self._sent.get(item.key, 0.0) for item in unread), default=None)
        if since is not None and time.monotonic() - since > UNREAD_S:
            self._end_unread()

    def _end_unread(self) -> None:
        self.is_unread = True
        self._stop.set()
