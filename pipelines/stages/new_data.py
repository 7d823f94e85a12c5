"""Stage `new_data`: the rows of this round as a data set."""

from __future__ import annotations

import json

from posttrain.core.config.stages import NewDataStage
from posttrain.core.data.problems import problem_to_json
from posttrain.pipelines.stage.context import StageContext, StageOutput
from posttrain.pipelines.stage.inputs import PROBLEMS_FILE


def run_new_data(context: StageContext) -> StageOutput:
    assert isinstance(context.stage, NewDataStage)
    context.started(1)
    context.record_dataset("train", context.rows)
    folder = context.out / "dataset"
    folder.mkdir()
    with (folder / PROBLEMS_FILE).open("w", encoding="utf-8") as stream:
        for problem in context.rows:
            stream.write(json.dumps(problem_to_json(problem)) + "\n")
    metrics = {"new_data/rows": float(len(context.rows))}
    context.tracker.log_summary(metrics)
    context.reporter.step_done(context.name, 1, {})
    return StageOutput({"dataset": folder}, metrics)
