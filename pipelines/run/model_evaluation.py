"""`posttrain eval`: a model measured by suites, kept in the home and in MLflow."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from posttrain.core.analysis.report import Cell, Report, table
from posttrain.core.config.evaluation_stages import EvaluateStage
from posttrain.core.config.resolve import ResolvedRun
from posttrain.core.config.schema import RunConfig
from posttrain.core.config.sections import EvaluationSection, ModelSection
from posttrain.core.config.suites import Suite
from posttrain.core.errors import ConfigError, ResourceError
from posttrain.core.evaluation.suites import (
    EVALUATIONS,
    Progress,
    SuiteMetric,
    SuiteOptions,
    SuiteResult,
    metric_values,
    options_values,
    write_suites,
)
from posttrain.core.models.device import ModelRuntime, set_threads
from posttrain.core.models.quiet import quiet_libraries
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.runtime.files import whole_folder
from posttrain.core.tracking.mlflow_evaluation import EvaluationRecord, record_evaluation
from posttrain.core.tracking.mlflow_store import prepare_database
from posttrain.pipelines.run.checks import resolve_configs
from posttrain.pipelines.run.model_reference import FoundModel, context_length
from posttrain.pipelines.stage.engines import EnginePool
from posttrain.pipelines.stage.suites import TABLE_ROWS, Measurement

logger = logging.getLogger(__name__)

EXPERIMENT = "evaluations"
"""MLflow's experiment for models that no run of the home made."""
MAX_LEN = 2048
"""Most tokens of prompt and response for a model of no run, or its own limit if lower."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Results of a model, where they are, and MLflow's ids; `note` says what did not work."""

    model: FoundModel
    results: Sequence[SuiteResult]
    folder: Path
    mlflow_run_id: str
    note: str = ""

    @property
    def metrics(self) -> list[SuiteMetric]:
        """The metrics of all suites."""
        return [metric for result in self.results for metric in result.metrics]

    def report(self) -> Report:
        """The table for people, and the JSON object."""
        rows = [metric_row(metric) for metric in self.metrics]
        return Report(
            f"{self.model.given}: {self.model.origin}",
            [self.note] if self.note else [],
            [table("suites", rows, "with 95 % intervals over samples; - where none is known")],
            {
                "model": str(self.model.path),
                "digest": self.model.digest,
                "run_id": self.model.run_id,
                "stage": self.model.stage,
                "suites": {result.suite.text: result.version for result in self.results},
                "metrics": [{**metric_row(metric), "key": metric.key} for metric in self.metrics],
                "folder": str(self.folder),
                "mlflow_run_id": self.mlflow_run_id,
                "notes": [self.note] if self.note else [],
            },
        )


def metric_row(metric: SuiteMetric) -> dict[str, Cell]:
    """A metric as a row of a table."""
    return {
        "suite": metric.suite,
        "task": metric.task,
        "metric": metric.metric,
        "value": metric.value,
        "low": metric.low,
        "high": metric.high,
        "samples": metric.num_samples,
    }


def evaluate_model(
    model: FoundModel,
    suites: Sequence[Suite],
    options: SuiteOptions,
    home: Path,
    progress: Progress,
    max_model_len: int | None = None,
) -> Evaluated:
    """Measure `model` by `suites`, keep the results, and record them in MLflow.

    Of a model of a run, its config says how it is loaded and what its chats begin with. Results
    are kept even if MLflow cannot be reached; then the note says so.
    """
    if model.kind != "model":
        raise ConfigError(
            f"'{model.given}' is a {model.kind}, which writes no text: name a stage that trains a "
            "policy"
        )
    quiet_libraries()
    config, manager = _settings(model, suites, options, max_model_len)
    set_threads(config.limits.num_threads)
    runtime = ModelRuntime.from_config(config.model)
    engines = EnginePool(config, manager, runtime)
    options = replace(options, system_prompt=config.model.system_prompt)
    try:
        results = Measurement(
            model=model.path,
            run=config,
            manager=manager,
            runtime=runtime,
            engines=engines,
            options=options,
            check=lambda: None,
            progress=progress,
        ).measure(suites)
    finally:
        engines.close()
    folder = _keep(model, results, options, home)
    evaluated = Evaluated(model, results, folder, "")
    try:
        run_id = _record(evaluated, options, home, config.name)
    except ResourceError as error:
        return replace(evaluated, note=f"the results are in {folder} and not in MLflow: {error}")
    return replace(evaluated, mlflow_run_id=run_id)


def _settings(
    model: FoundModel, suites: Sequence[Suite], options: SuiteOptions, max_model_len: int | None
) -> tuple[RunConfig, PluginManager]:
    """The config of the model's run with its plugins, or one for a model of no run."""
    if model.run is not None:
        resolved: ResolvedRun
        resolved, manager = resolve_configs([model.run.unchanged_config()], None)
        config = resolved.config
    elif any(suite.harness == "held_out" for suite in suites):
        raise ConfigError(
            "suite 'held_out' is the evaluation of the run that made the model, and "
            f"'{model.given}' was made by no run of this home: name RUN, RUN/STAGE or another suite"
        )
    else:
        stage = EvaluateStage(kind="evaluate", inputs={"model": "base"})
        section = ModelSection(
            source=str(model.path), max_model_len=context_length(model.path, MAX_LEN)
        )
        config = RunConfig(name=EXPERIMENT, model=section, stages={"evaluate": stage})
        manager = PluginManager()
    changed: dict[str, object] = {"source": str(model.path), "until_registered": None}
    if max_model_len is not None:
        changed["max_model_len"] = max_model_len
    batch = {"batch_size": options.batch_size}
    evaluation: EvaluationSection = config.evaluation.model_copy(update=batch)
    update = {"model": config.model.model_copy(update=changed), "evaluation": evaluation}
    # On this machine, wherever the run was.
    return config.model_copy(update=update | {"cluster": None}), manager


def _keep(
    model: FoundModel, results: Sequence[SuiteResult], options: SuiteOptions, home: Path
) -> Path:
    """A new folder in the home with the results, whole or not at all."""
    now = datetime.now(UTC)
    unique = uuid.uuid4().hex[:8]
    folder = home / EVALUATIONS / f"{now:%Y%m%d-%H%M%S}-{model.digest[:8]}-{unique}"
    with whole_folder(folder) as partial:
        write_suites(partial, results, options, model.digest, now.isoformat(timespec="seconds"))
    return folder


def _record(evaluated: Evaluated, options: SuiteOptions, home: Path, experiment: str) -> str:
    model, results = evaluated.model, evaluated.results
    names = " ".join(result.suite.text for result in results)
    record = EvaluationRecord(
        name=f"eval {names}"[:200],
        experiment=experiment,
        parent=model.run_id,
        tags={
            "posttrain.kind": "eval",
            "posttrain.model": model.given,
            "posttrain.model_digest": model.digest,
            "posttrain.evaluated_stage": model.stage,
            **{f"posttrain.suite.{r.suite.harness}": r.version for r in results},
        },
        params={"suites": names, **options_values(options)},
        metrics=metric_values(evaluated.metrics),
        model_id=model.mlflow_model_id,
        rows=[row for result in results for row in result.rows][:TABLE_ROWS],
        folder=evaluated.folder,
    )
    uri = os.environ.get("MLFLOW_TRACKING_URI") or prepare_database(home)
    return record_evaluation(uri, record)[1]
