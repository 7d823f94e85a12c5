"""Stage `new_data`: the rows of this round as a data set."""

from __future__ import annotations

from posttrain.core.config.gate_stages import NewDataStage
from posttrain.core.contracts import StageOutput
from posttrain.pipelines.stage.context import StageContext


def run_new_data(context: StageContext) -> StageOutput:
    assert isinstance(context.stage, NewDataStage)
    context.started(1)
    context.record_dataset("train", context.rows)
    folder = context.write_problems(context.rows)
    metrics = {"new_data/rows": float(len(context.rows))}
    context.tracker.log_summary(metrics)
    context.reporter.step_done(context.name, 1, {})
    return StageOutput({"dataset": folder}, metrics)
