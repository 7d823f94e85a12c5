"""A gate of a deployed run that nobody answers: a run planned for that moment applies `on_timeout`.

Prefect fails a suspended flow run when its time is over, and no process of ours is there to see it.
So a second run of the deployment is planned as the first one is suspended. All it computes anew is
what follows the gate. An answer takes it off the plan.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import UUID

from prefect import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterIdempotencyKey
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound
from prefect.states import Scheduled

TAG = "nobody-answered:"
"""A tag of the planned run: this and the id of the run that asked."""
GRACE_S = 2
"""So that the time is over by the gate's clock as well when the planned run comes to it."""


def plan(asking: FlowRun, pause: str, seconds: int) -> None:
    """Plan the run that applies the gate's `on_timeout` in `seconds`. Asked twice it plans one."""
    if asking.deployment_id is None:
        raise ValueError("a flow run that no deployment made is not suspended")
    begins = datetime.now(UTC) + timedelta(seconds=seconds + GRACE_S)
    with get_client(sync_client=True) as client:
        client.create_flow_run_from_deployment(
            asking.deployment_id,
            name=f"{asking.name}-no-answer",
            parameters=asking.parameters,
            state=Scheduled(scheduled_time=begins),
            tags=[*(tag for tag in asking.tags if not tag.startswith(TAG)), f"{TAG}{asking.id}"],
            idempotency_key=_key(asking, pause),
            work_queue_name=asking.work_queue_name,
            job_variables=asking.job_variables,
        )


def unplan(asking: FlowRun, pause: str) -> None:
    """Somebody answered: the run that waited for the end of the time is not needed."""
    mine = FlowRunFilter(idempotency_key=FlowRunFilterIdempotencyKey(any_=[_key(asking, pause)]))
    with get_client(sync_client=True) as client:
        for planned in client.read_flow_runs(flow_run_filter=mine):
            if planned.state is not None and planned.state.is_scheduled():
                client.delete_flow_run(planned.id)


def cancelled_before() -> str | None:
    """The run that asked, where somebody cancelled or deleted it: nothing is to be applied then."""
    context = FlowRunContext.get()
    tags = [] if context is None or context.flow_run is None else context.flow_run.tags
    asked = next((tag.removeprefix(TAG) for tag in tags if tag.startswith(TAG)), None)
    if asked is None:
        return None
    with get_client(sync_client=True) as client:
        try:
            state = client.read_flow_run(UUID(asked)).state
        except ObjectNotFound:
            return asked
    ended = state is not None and (state.is_cancelled() or state.is_cancelling())
    return asked if ended else None


def _key(asking: FlowRun, pause: str) -> str:
    return f"{asking.id}-{pause}"
