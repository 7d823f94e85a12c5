"""The `post_training` flow: the stages of a config as a DAG of Prefect tasks.

A stage starts when the stages it reads are done. With `limits.max_parallel_stages` above 1,
independent stages run at the same time; else they run one after another in this thread.
"""

from __future__ import annotations

import time
from typing import Any

from prefect import Flow, flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.futures import PrefectFuture
from prefect.runtime import flow_run
from prefect.states import Cancelled
from prefect.task_runners import ThreadPoolTaskRunner

from posttrain.core.artifacts import StageResult
from posttrain.core.config.dag import dependencies
from posttrain.core.errors import ApprovalRefused
from posttrain.pipelines.device_limit import device_tags
from posttrain.pipelines.flow_records import leave_results, leave_samples
from posttrain.pipelines.pipeline import Pipeline
from posttrain.pipelines.retries import options_for
from posttrain.pipelines.rl.live import Live
from posttrain.pipelines.settling import first_closed

LiveResult = Live[StageResult | None]


# Reuse across runs is decided by our own content hash, inside the task, so Prefect caches nothing.
@task(task_run_name="{stage}", cache_policy=NO_CACHE, persist_result=False, retries=0)
def run_stage(stage: str, pipeline: Live[Pipeline], upstream: dict[str, LiveResult]) -> LiveResult:
    """Run one stage, or reuse what an equal stage made before.

    Results travel in handles, because Prefect draws its edges by the identity of values: two
    results that hold one interned string would look connected. None is for what a closed gate holds
    back.
    """
    inputs = {name: result.value for name, result in upstream.items()}
    result = pipeline.value.run_stage(stage, inputs)
    if result is not None:
        leave_samples(result)
    return Live(result)


@flow(
    name="post_training",
    flow_run_name="{name}",
    validate_parameters=False,
    persist_result=False,
)
def post_training(
    name: str, config: dict[str, object], pipeline: Live[Pipeline]
) -> State[None] | None:
    """All stages of the pipeline, each after those it reads. `config` is shown in Prefect's UI.

    A gate that is not passed ends it as cancelled: a completed run Prefect would not start again
    when a deployed run is resumed with the answer.
    """
    live = pipeline.value
    live.joined_flow(str(flow_run.id))
    began = time.perf_counter()
    parallel = live.config.limits.max_parallel_stages > 1
    results: dict[str, LiveResult | PrefectFuture[LiveResult]] = {}
    for stage in live.resolved.order:
        kind = live.config.stages[stage].kind
        tags = device_tags(live.runtime.device.type)
        of_kind = run_stage.with_options(tags=tags, **options_for(kind))
        upstream = {other: results[other] for other in dependencies(live.config.stages[stage])}
        if parallel:
            results[stage] = of_kind.submit(stage, pipeline, upstream)  # type: ignore[arg-type]
        else:
            results[stage] = of_kind(stage, pipeline, upstream)  # type: ignore[arg-type]
    for result in results.values():
        if isinstance(result, PrefectFuture):
            result.result()
    leave_results(live.result(time.perf_counter() - began))
    closed = first_closed(live)
    if closed is None:
        return None
    label = "Rejected" if isinstance(closed, ApprovalRefused) else "AwaitingApproval"
    return Cancelled(name=label, message=str(closed))


def flow_for(max_parallel_stages: int) -> Flow[..., Any]:
    """The flow with as many stage threads as the config allows."""
    runner: ThreadPoolTaskRunner[Any] = ThreadPoolTaskRunner(max_workers=max_parallel_stages)
    return post_training.with_options(task_runner=runner)  # type: ignore[arg-type]
