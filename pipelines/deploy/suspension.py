"""A gate of a deployed run that nobody answers: a run planned for that moment applies `on_timeout`.

Prefect fails a suspended flow run when its time is over, and no process of ours is there to see it.
So a second run of the deployment is planned as the first one is suspended. All it computes again is
what follows the gate. An answer takes it off the plan.

While it is suspended there is no process, and no device in use. Resumed, the flow begins again:
what was computed is reused, and the answer is where the gate looks for it.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal
from uuid import UUID

from prefect import get_client, suspend_flow_run
from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterIdempotencyKey
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound
from prefect.input import RunInput
from prefect.states import Scheduled
from pydantic import Field

from posttrain.core.store.approval import (
    Answer,
    ApprovalNeeded,
    ApprovalRequest,
    approvals,
    keep_answer,
    kept_answer,
)

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


SEPARATOR = "-"
"""Between stage and gate key in the key of a suspension; a stage's name has none."""


class ApprovalForm(RunInput):
    """What Prefect's Resume form asks. The decision has no default: an empty form is not an
    answer.
    """

    decision: Literal["approve", "reject"] = Field(title="Decision")
    name: str = Field(min_length=1, title="Your name", description="Kept with the decision.")
    reason: str = Field(default="", title="Reason", description="Kept with the decision.")

    def answer(self) -> Answer:
        return Answer.now(self.decision == "approve", self.name, self.reason, "prefect")


def take_answers(home: Path) -> None:
    """Keep what this flow run was answered while it was suspended, where its gates look."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return
    policy = context.flow_run.empirical_policy
    for pause in sorted(policy.pause_keys or ()):
        stage, _, key = pause.rpartition(SEPARATOR)
        if stage and kept_answer(approvals(home), stage, key) is None:
            # This suspension is over, so Prefect hands out its answer instead of suspending again.
            form = suspend_flow_run(wait_for_input=ApprovalForm, key=pause)
            keep_answer(approvals(home), stage, key, form.answer())
            unplan(context.flow_run, pause)


def wait_for_answer(needed: ApprovalNeeded, home: Path) -> None:
    """Suspend this flow run until somebody answers: raises what ends the process.

    With a time limit, a run that applies what no answer means is planned for its end. A flow that
    no deployment made cannot be suspended: `needed` is raised, and ends it.
    """
    request, context = needed.request, FlowRunContext.get()
    flow_run = None if context is None else context.flow_run
    if request is None or flow_run is None or flow_run.deployment_id is None:
        raise needed
    create_markdown_artifact(request.markdown, key=f"approval-{request.stage.replace('_', '-')}")
    pause, seconds = f"{request.stage}{SEPARATOR}{request.key}", _seconds_left(request)
    if seconds is not None:
        plan(flow_run, pause, seconds)
    form = suspend_flow_run(
        wait_for_input=ApprovalForm.with_initial_data(description=request.markdown),
        timeout=seconds,
        key=pause,
    )
    keep_answer(approvals(home), request.stage, request.key, form.answer())


def _seconds_left(request: ApprovalRequest) -> int | None:
    if request.timeout_s is None:
        return None
    asked = datetime.fromisoformat(request.asked_at)
    return max(1, round(request.timeout_s - (datetime.now(UTC) - asked).total_seconds()))
