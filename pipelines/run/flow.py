"""The `post_training` flow: the stages of a config as a DAG of Prefect tasks.

A stage starts when the stages it reads are done. With `limits.max_parallel_stages` above 1,
independent stages run at the same time; else they run one after another in this thread.
"""

from __future__ import annotations

import time
from typing import Any

import httpx
from prefect import Flow, flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State, TaskRun
from prefect.exceptions import ObjectNotFound
from prefect.futures import PrefectFuture
from prefect.runtime import flow_run
from prefect.states import Cancelled
from prefect.task_runners import ThreadPoolTaskRunner

from posttrain.core.config.dag import dependencies
from posttrain.core.errors import ApprovalRefused, causes
from posttrain.core.redaction import redact_error
from posttrain.core.store.artifacts import StageResult
from posttrain.pipelines.rl.live import Live
from posttrain.pipelines.rl.prefect_away import Body, went_away
from posttrain.pipelines.run.flow_records import leave_results, leave_samples
from posttrain.pipelines.run.pipeline import Pipeline
from posttrain.pipelines.run.settling import first_closed

RETRIES = 2
DELAY_S = 5.0


def options_for(repeatable: bool) -> dict[str, Any]:
    """Options of the task that runs a stage."""
    if not repeatable:
        return {"retries": 0}
    return {
        "retries": RETRIES,
        "retry_delay_seconds": DELAY_S,
        "retry_condition_fn": after_a_lost_connection,
    }


def after_a_lost_connection(task: Any, run: TaskRun, state: State[Any]) -> bool:
    """Whether the task failed because something that it talked to could not be reached."""
    error = state.result(raise_on_failure=False)
    return isinstance(error, BaseException) and lost_connection(error)


def lost_connection(error: BaseException) -> bool:
    """Whether a lost connection, or one that timed out, is behind `error`."""
    return any(isinstance(found, ConnectionError | TimeoutError) for found in causes(error))


def device_tags(device: str) -> list[str]:
    """`posttrain-cpu` or `posttrain-cuda` for a stage's task, where a limit is on that tag.

    Only there: Prefect asks its server for a slot for each task with a tag. On SQLite the answer is
    503 while something else is stored; Prefect's client asks again after 2 s, and fails the task
    after five times.
    """
    tag = f"posttrain-{device}"
    with get_client(sync_client=True) as client:
        try:
            client.read_concurrency_limit_by_tag(tag)
        except ObjectNotFound:
            return []
        except httpx.HTTPError as error:
            went_away(error)
            return []  # a task with a tag waits for a slot, which nobody gives out
    return [tag]


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
    try:
        result = pipeline.value.run_stage(stage, inputs)
    except Exception as error:  # Prefect stores its message, and those of the errors behind it
        redact_error(error)
        raise
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
    name: str, config: dict[str, object], pipeline: Live[Pipeline], body: Live[Body]
) -> State[None] | None:
    """All stages of the pipeline, each after those it reads. `config` is shown in Prefect's UI.

    A gate that is not passed ends it as cancelled: a completed run Prefect would not start again
    when a deployed run is resumed with the answer.
    """
    with body.value.running():
        return _run_stages(pipeline)


def _run_stages(pipeline: Live[Pipeline]) -> State[None] | None:
    live = pipeline.value
    live.joined_flow(str(flow_run.id))
    began = time.perf_counter()
    parallel = live.config.limits.max_parallel_stages > 1
    results: dict[str, LiveResult | PrefectFuture[LiveResult]] = {}
    for stage in live.resolved.order:
        config = live.config.stages[stage]
        tags = device_tags(live.runtime.device.type)
        of_kind = run_stage.with_options(tags=tags, **options_for(config.repeatable))
        upstream = {other: results[other] for other in dependencies(config)}
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
