"""Single responses as MLflow traces: the prompt, the answer, and what it was paid, as feedback."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlflow
from mlflow.entities import AssessmentSource

from posttrain.core.batch import RolloutBatch
from posttrain.core.tracking.tables import sample_rows

if TYPE_CHECKING:
    from posttrain.core.tracking.mlflow_run import Session

SOURCE_RUN = "mlflow.sourceRun"
"""The metadata by which MLflow shows a trace among those of a run."""
NAME = "response"


@dataclass(frozen=True, slots=True)
class TracedResponse:
    """A response of a step. `feedback` holds rewards, advantage and verdict by name."""

    step: int
    prompt: str
    response: str
    feedback: Mapping[str, float]
    attributes: Mapping[str, object]
    turns: tuple[str, ...] = ()


def traced_responses(
    batch: RolloutBatch, step: int, component_names: Sequence[str], count: int
) -> list[TracedResponse]:
    """`count` responses of a step: the best and the worst paid first, so that they differ."""
    rows = sample_rows(batch, component_names, len(batch))
    scored = [
        (reward, index)
        for index, row in enumerate(rows)
        if isinstance(reward := row["reward"], float)
        and row["prompt"] is not None
        and row["response"] is not None
    ]
    ranked = [index for _, index in sorted(scored, key=lambda item: (-item[0], item[1]))]
    chosen = [ranked[-1 - i // 2] if i % 2 else ranked[i // 2] for i in range(len(ranked))][:count]
    return [_traced(rows[i], batch.turns[i] if batch.turns else (), step) for i in chosen]


def _traced(row: Mapping[str, object], turns: tuple[str, ...], step: int) -> TracedResponse:
    shown = {"prompt", "response", "reward_detail"}
    feedback = {
        name: float(value)
        for name, value in row.items()
        if isinstance(value, float) and math.isfinite(value)
    }
    rest = {k: v for k, v in row.items() if k not in feedback and k not in shown and v is not None}
    if row.get("reward_detail"):
        rest["reward_detail"] = row["reward_detail"]
    return TracedResponse(
        step,
        str(row["prompt"]),
        str(row["response"]),
        feedback,
        rest,
        turns if len(turns) > 1 else (),
    )


def write_trace(session: Session, run_id: str, traced: TracedResponse) -> str:
    """Write one trace with its feedback, among those of the run; returns the trace's id.

    It is written before this returns: MLflow's own queue would make its feedback wait a second.
    """
    os.environ.setdefault("MLFLOW_ENABLE_ASYNC_TRACE_LOGGING", "false")
    mlflow.set_tracking_uri(session.uri)
    root = mlflow.start_span_no_context(
        NAME,
        span_type="AGENT" if traced.turns else "LLM",
        inputs={"prompt": traced.prompt},
        attributes={k: str(v) for k, v in {"step": traced.step, **traced.attributes}.items()},
        metadata={SOURCE_RUN: run_id},
        tags={"posttrain.step": str(traced.step)},
        experiment_id=session.experiment_id,
    )
    for number, text in enumerate(traced.turns, start=1):
        turn = mlflow.start_span_no_context(f"turn {number}", span_type="LLM", parent_span=root)
        turn.set_outputs(text)
        turn.end()
    root.set_outputs(traced.response)
    root.end()
    mlflow.flush_trace_async_logging()
    for name, value in traced.feedback.items():
        mlflow.log_feedback(
            trace_id=root.trace_id,
            name=name.replace("/", "."),
            value=value,
            source=AssessmentSource("CODE", "posttrain"),
        )
    return str(root.trace_id)
