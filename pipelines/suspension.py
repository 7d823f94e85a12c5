"""A gate of a deployed run: the flow run is suspended, and goes on with what the form was answered.

While it is suspended there is no process, and no device in use. Resumed, the flow begins anew: what
was computed is reused, and the answer is where the gate looks for it.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from prefect import suspend_flow_run
from prefect.artifacts import create_markdown_artifact
from prefect.context import FlowRunContext
from prefect.input import RunInput
from pydantic import Field

from posttrain.core.approval import (
    Answer,
    ApprovalNeeded,
    ApprovalRequest,
    approvals,
    keep_answer,
    kept_answer,
)
from posttrain.pipelines.no_answer import plan, unplan

SEPARATOR = "-"
"""Between stage and gate key in the key of a suspension; a stage's name has none."""


class ApprovalForm(RunInput):
    """What Prefect's Resume form asks. The decision has no default: an empty form is no answer."""

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
