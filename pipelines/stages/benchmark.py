"""Stage `benchmark`: suites of lm-eval and inspect-ai of a model."""

from __future__ import annotations

from pathlib import Path

from posttrain.core.config.evaluation_stages import BenchmarkStage
from posttrain.core.config.suites import parse_suite
from posttrain.core.contracts import StageOutput
from posttrain.core.evaluation.suites import (
    SUITES,
    SuiteOptions,
    metric_values,
    require_suites,
    write_suites,
)
from posttrain.pipelines.stage.context import StageContext
from posttrain.pipelines.stage.suites import TABLE_ROWS, Measurement


def run_benchmark(context: StageContext) -> StageOutput:
    """Measure the input model by each suite."""
    stage = context.stage
    assert isinstance(stage, BenchmarkStage)
    suites = [parse_suite(text) for text in stage.suites]
    require_suites(suites)
    options = SuiteOptions(
        limit=stage.limit,
        fewshot=stage.fewshot,
        tasks_dir=None if stage.tasks_dir is None else Path(stage.tasks_dir).expanduser().resolve(),
        chat=stage.chat_template,
        batch_size=stage.batch_size,
        max_tokens=stage.max_tokens,
        seed=context.run.seed,
        download=stage.download,
        system_prompt=context.run.model.system_prompt,
    )
    context.started(len(suites))
    measurement = Measurement(
        model=context.model_dir,
        run=context.run,
        manager=context.manager,
        runtime=context.runtime,
        engines=context.engines,
        options=options,
        check=context.check,
        progress=lambda what, done, total: context.check(),
    )
    results = []
    for number, suite in enumerate(suites, start=1):
        results += measurement.measure([suite])
        context.progress(number)
    metrics = metric_values([metric for result in results for metric in result.metrics])
    model = context.inputs["model"]
    folder = write_suites(context.out / SUITES, results, options, model.digest)
    rows = [row for result in results for row in result.rows]
    context.tracker.log_table("samples", 0, rows[:TABLE_ROWS])
    context.tracker.log_summary(metrics, model.mlflow_model_id)
    context.tracker.set_tags({f"posttrain.suite.{r.suite.harness}": r.version for r in results})
    return StageOutput({"report": folder}, metrics)
