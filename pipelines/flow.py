"""The `post_training` flow: the stages of a config as a DAG of Prefect tasks.

A stage starts when the stages it reads are done. With `limits.max_parallel_stages` above 1,
independent stages run at the same time; else they run one after another in this thread.
"""

from __future__ import annotations

from typing import Any

from prefect import Flow, flow, task
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture
from prefect.runtime import flow_run
from prefect.task_runners import ThreadPoolTaskRunner

from posttrain.core.artifacts import StageResult
from posttrain.core.config.dag import dependencies
from posttrain.pipelines.live import Live
from posttrain.pipelines.pipeline import Pipeline

LiveResult = Live[StageResult]


# Reuse across runs is decided by our own content hash, inside the task, so Prefect caches nothing.
@task(task_run_name="{stage}", cache_policy=NO_CACHE, persist_result=False, retries=0)
def run_stage(stage: str, pipeline: Live[Pipeline], upstream: dict[str, LiveResult]) -> LiveResult:
    """Run one stage, or reuse what an equal stage made before.

    Results travel in handles, because Prefect draws its edges by the identity of values: two
    results that hold one interned string would look connected.
    """
    inputs = {name: result.value for name, result in upstream.items()}
    return Live(pipeline.value.run_stage(stage, inputs))


@flow(
    name="post_training",
    flow_run_name="{name}",
    validate_parameters=False,
    persist_result=False,
)
def post_training(name: str, config: dict[str, object], pipeline: Live[Pipeline]) -> None:
    """All stages of the pipeline, each after those it reads. `config` is shown in Prefect's UI."""
    live = pipeline.value
    live.joined_flow(str(flow_run.id))
    parallel = live.config.limits.max_parallel_stages > 1
    results: dict[str, LiveResult | PrefectFuture[LiveResult]] = {}
    for stage in live.resolved.order:
        upstream = {other: results[other] for other in dependencies(live.config.stages[stage])}
        if parallel:
            results[stage] = run_stage.submit(stage, pipeline, upstream)  # type: ignore[arg-type]
        else:
            results[stage] = run_stage(stage, pipeline, upstream)  # type: ignore[arg-type]
    for result in results.values():
        if isinstance(result, PrefectFuture):
            result.result()


def flow_for(max_parallel_stages: int) -> Flow[..., None]:
    """The flow with as many stage threads as the config allows."""
    runner: ThreadPoolTaskRunner[Any] = ThreadPoolTaskRunner(max_workers=max_parallel_stages)
    return post_training.with_options(task_runner=runner)  # type: ignore[arg-type]
