"""What Prefect's pages show of a run in addition to its graph: log, progress, samples, card,
events.

A run goes on without them: what the server does not take is a warning, and no more.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import httpx
from prefect import get_client
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.context import FlowRunContext, TaskRunContext
from prefect.events import emit_event
from prefect.events.filters import EventFilter, EventNameFilter, EventResourceFilter
from prefect.exceptions import PrefectException
from prefect.logging.handlers import APILogHandler

from posttrain.core.redaction import redacted
from posttrain.core.runtime.reporter import SilentReporter
from posttrain.core.store.artifacts import RunResult, StageResult
from posttrain.pipelines.rl.prefect_away import unreachable, went_away
from posttrain.pipelines.run.progress import LogReporter, describe
from posttrain.pipelines.run.summary import links, summary_markdown

PROGRESS_EVERY_S = 5.0
"""An update is a call to the server, some 10 ms."""
SHOWN_SAMPLES = 20
END_WITHIN_S = 3.0
BEFORE_THE_END = ("Scheduled", "Late", "Pending", "Running", "Cancelling", "Suspended", "heartbeat")

logger = logging.getLogger(__name__)


@contextmanager
def for_the_pages(what: str) -> Iterator[None]:
    """Warn that Prefect's pages lack `what` where its server refuses it or does not answer."""
    try:
        yield
    except (httpx.HTTPError, PrefectException) as error:
        if unreachable(error):
            went_away(error)
        first = redacted((str(error).splitlines() or [type(error).__name__])[0])
        logger.warning("Prefect's pages lack %s: %s", what, first)


class FlowLog(LogReporter):
    """The lines of the terminal, as the log of the flow run."""

    def __init__(self, flow_run_id: str) -> None:
        logger = logging.getLogger("posttrain.flow_run")
        logger.setLevel(logging.INFO)
        logger.propagate = False  # the terminal has them already
        if not logger.handlers:
            logger.addHandler(APILogHandler())
        super().__init__(logging.LoggerAdapter(logger, {"flow_run_id": flow_run_id}))


class FlowProgress(SilentReporter):
    """A progress artifact for each stage, moved every few seconds."""

    def __init__(self) -> None:
        self._bars: dict[str, UUID] = {}
        self._totals: dict[str, int] = {}
        self._moved: dict[str, float] = {}

    def stage_started(self, stage: str, kind: str, total_steps: int) -> None:
        """An empty bar."""
        self._totals[stage], self._moved[stage] = total_steps, time.monotonic()
        with for_the_pages(f"the bar of stage '{stage}'"):
            made = create_progress_artifact(
                0.0, key=f"progress-{slug(stage)}", description=f"{kind}, {total_steps} steps"
            )
            assert isinstance(made, UUID), "outside of an event loop it is not a coroutine"
            self._bars[stage] = made

    def step_done(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        """Move the bar, unless it was moved just now."""
        now, total = time.monotonic(), self._totals.get(stage, 0)
        if stage in self._bars and total and now - self._moved[stage] >= PROGRESS_EVERY_S:
            self._moved[stage] = now
            self._show(stage, 100.0 * step / total, f"step {step} of {total}", metrics)

    def stage_finished(
        self, stage: str, status: str, seconds: float, metrics: Mapping[str, float]
    ) -> None:
        """Fill the bar of a stage that was computed."""
        if stage in self._bars and status in ("ran", "resumed"):
            self._show(stage, 100.0, status, metrics)

    def _show(self, stage: str, percent: float, text: str, metrics: Mapping[str, float]) -> None:
        bar = self._bars.pop(stage)  # one that could not be moved is not tried again
        with for_the_pages(f"the progress of stage '{stage}' ({text})"):
            update_progress_artifact(
                bar, min(percent, 100.0), description=f"{text}  {describe(metrics)}"
            )
            self._bars[stage] = bar


def leave_results(result: RunResult) -> None:
    """The run's card, and its page in MLflow."""
    link, card = links(result).get("mlflow"), redacted(summary_markdown(result))
    with for_the_pages("the run's results"):
        if link is not None:
            create_link_artifact(link, link_text="the run in MLflow", key="mlflow-run")
        create_markdown_artifact(card, key="run-card")


def leave_samples(result: StageResult) -> None:
    """A table of answers of a stage that measured a model."""
    for item in result.artifacts:
        path = item.path / "rows.jsonl"  # which an evaluation of another package may not have
        if item.kind == "evaluation" and path.is_file():
            rows = path.read_text().splitlines()[:SHOWN_SAMPLES]
            table = [_sample(json.loads(row)) for row in rows]
            with for_the_pages(f"samples of stage '{result.name}'"):
                create_table_artifact(table, key=f"samples-{slug(result.name)}")


def _sample(row: Mapping[str, Any]) -> dict[str, Any]:  # Any: JSON
    problem = row["problem"]
    return {
        "prompt": problem["prompt"],
        "answer": problem["answer"],
        "response": row["greedy_text"],
        "correct": row["greedy_correct"],
    }


def announce(event: str, run_id: str, stage: str, payload: Mapping[str, Any]) -> None:
    """Emit a custom event of the pipeline run (`run_id` is MLflow's), for automations.

    Outside a flow nobody is informed: Prefect would start a thread that waits for events, and
    which a forked process cannot end.
    """
    if FlowRunContext.get() is None and TaskRunContext.get() is None:
        return
    resource = {"prefect.resource.id": f"posttrain.run.{run_id}", "posttrain.stage": stage}
    emit_event(event, resource=resource, payload=dict(payload))


def wait_for_the_end(flow_run_id: str) -> None:
    """Until the server has stored the event of the flow run's end, for a few seconds at most."""
    prefix = "prefect.flow-run."
    names = EventNameFilter(prefix=[prefix], exclude_name=[prefix + n for n in BEFORE_THE_END])
    resource = EventResourceFilter(id=[f"{prefix}{flow_run_id}"])
    ends = time.monotonic() + END_WITHIN_S
    with for_the_pages("the run's last events"), get_client(sync_client=True) as client:
        while time.monotonic() < ends:
            if client.read_events(EventFilter(event=names, resource=resource), limit=1).total:
                return
            time.sleep(0.05)
        logger.warning(
            "Prefect's pages lack the run's last events: not stored within %g s", END_WITHIN_S
        )


def tag_flow_run(flow_run_id: str, tags: list[str]) -> None:
    """Tag the flow run alone: tags of a context would make each of its tasks ask for a slot."""
    with for_the_pages("the run's tags"), get_client(sync_client=True) as client:
        client.update_flow_run(UUID(flow_run_id), tags=tags)


def slug(name: str) -> str:
    """A stage's name as keys of artifacts may be."""
    return name.replace("_", "-")
