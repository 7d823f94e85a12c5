"""The RL flow: the page to read first. One Prefect task per phase of a step.

    rollout -> score_rewards -> compute_advantages -> update_policy -> sync_weights
                                                       (+ evaluate, checkpoint when due)

The tasks pass the live `RolloutBatch` in memory behind an opaque handle: nothing is pickled, cached
or walked. What each phase does is a method of `RlLoop`; the maths lives in `core` and in plugins.
"""

from __future__ import annotations

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from posttrain.core.batch import RolloutBatch
from posttrain.pipelines.live import Live
from posttrain.pipelines.rl_loop import RlLoop

# An optimizer step must never be repeated, so no phase is retried.
phase = task(cache_policy=NO_CACHE, persist_result=False, retries=0)

LiveLoop = Live[RlLoop]
LiveBatch = Live[RolloutBatch]


@phase
def rollout(loop: LiveLoop, step: int) -> LiveBatch:
    """Sample a group of responses for each prompt of this step."""
    return Live(loop.value.rollout(step))


@phase
def score_rewards(loop: LiveLoop, batch: LiveBatch) -> LiveBatch:
    """Verify and score every response."""
    return Live(loop.value.score_rewards(batch.value))


@phase
def compute_advantages(loop: LiveLoop, batch: LiveBatch) -> LiveBatch:
    """Turn rewards into per-token advantages."""
    return Live(loop.value.compute_advantages(batch.value))


@phase
def update_policy(loop: LiveLoop, batch: LiveBatch, step: int) -> None:
    """Take the optimizer steps of this batch."""
    loop.value.update_policy(batch.value, step)


@phase
def sync_weights(loop: LiveLoop, step: int) -> None:
    """Give the engine the weights of policy version `step`."""
    loop.value.sync_weights(step)


@phase
def evaluate(loop: LiveLoop, step: int) -> None:
    """Measure held-out accuracy."""
    loop.value.evaluate(step)


@phase
def checkpoint(loop: LiveLoop, step: int) -> None:
    """Save what an interrupted run needs to continue after this step."""
    loop.value.checkpoint(step)


@flow(name="rl", flow_run_name="{stage}", validate_parameters=False, persist_result=False)
def rl_flow(stage: str, loop: LiveLoop) -> None:
    """All steps of one RL stage, from where the loop stands to its last step."""
    if loop.value.evaluates_before_first_step:
        evaluate(loop, 0)
    for step in loop.value.remaining_steps():
        loop.value.begin_step(step)
        batch = rollout(loop, step)
        scored = score_rewards(loop, batch)
        ready = compute_advantages(loop, scored)
        update_policy(loop, ready, step)
        sync_weights(loop, step)
        if loop.value.evaluation_is_due(step):
            evaluate(loop, step)
        loop.value.end_step(step)
        if loop.value.checkpoint_is_due(step):
            checkpoint(loop, step)
