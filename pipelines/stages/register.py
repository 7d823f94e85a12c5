"""Stage `register`: put a model into MLflow's registry, with its evaluation, under an alias."""

from __future__ import annotations

import json

from posttrain.core.config.schema import RegisterStage
from posttrain.core.contracts import StageOutput
from posttrain.core.errors import RunError
from posttrain.core.tracking import registry
from posttrain.pipelines.stage.context import StageContext


def run_register(context: StageContext) -> StageOutput:
    """Register the input model by reference; the alias then names this version."""
    stage = context.stage
    assert isinstance(stage, RegisterStage)
    model, evaluation = context.inputs["model"], context.inputs["evaluation"]
    if not model.mlflow_model_id:
        raise RunError(
            f"stage '{context.name}' reads the base model, which no stage of this pipeline made: "
            "register a model that sft or rl made"
        )
    context.started(1)
    metrics = json.loads((evaluation.path / "metrics.json").read_text())
    tags = {"digest": model.digest, "uri": model.uri}
    tags |= {name.replace("/", "."): f"{value:.4f}" for name, value in metrics.items()}
    uri, name = context.mlflow_uri, stage.registered_name
    version = registry.register_champion(uri, model.mlflow_model_id, name, tags)
    registry.move_alias(uri, name, stage.alias, version)
    record = {
        "name": stage.registered_name,
        "version": version,
        "alias": stage.alias,
        "model_digest": model.digest,
        "evaluation_digest": evaluation.digest,
    }
    path = context.out / "registration.json"
    path.write_text(json.dumps(record, indent=2))
    context.tracker.log_file(path)
    context.reporter.step_done(context.name, 1, {})
    context.reporter.say(f"registered {stage.registered_name} version {version} as '{stage.alias}'")
    headline = {k: v for k, v in metrics.items() if k.startswith("eval/")}
    return StageOutput({"registration": path}, headline)
