"""The RL flow: the page to read first. One Prefect task per phase of a step.

    rollout -> score_rewards -> compute_advantages -> update_policy -> sync_weights
                                                       (+ evaluate, checkpoint when due)

With `max_staleness: k` the rollouts of the next k steps are sampled while `update_policy` runs; all
of them are done before the weights change, so rollout n always has policy max(0, n - 1 - k).

The tasks pass the live `Rollout` in memory behind an opaque handle: nothing is pickled, cached or
walked. What each phase does is a method of `RlLoop` in `step.py`, which returns what it made with
its metrics; `Recorder.run` times it and records these. The maths lives in `core` and in plugins.
"""

from __future__ import annotations

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture

from posttrain.pipelines.rl.live import Live
from posttrain.pipelines.rl.rollouts import Rollout
from posttrain.pipelines.rl.step import RlLoop

# An optimizer step must never be repeated, so no phase is retried.
phase = task(cache_policy=NO_CACHE, persist_result=False, retries=0)

LiveLoop = Live[RlLoop]
LiveRollout = Live[Rollout]


@phase
def rollout(loop: LiveLoop, step: int) -> LiveRollout:
    """Sample a group of responses for each prompt of this step."""
    return Live(loop.value.rollouts.sample(step))


@phase
def score_rewards(loop: LiveLoop, sampled: LiveRollout) -> LiveRollout:
    """Verify and score every response."""
    record = loop.value.recorder
    return Live(record.run(loop.value.score_rewards, sampled.value))


@phase
def compute_advantages(loop: LiveLoop, scored: LiveRollout) -> LiveRollout:
    """Turn rewards into per-token advantages."""
    record = loop.value.recorder
    return Live(record.run(loop.value.compute_advantages, scored.value))


@phase
def update_policy(loop: LiveLoop, ready: LiveRollout) -> None:
    """Take the optimizer steps of this batch, and record what they were made of."""
    record = loop.value.recorder
    record.updated(record.run(loop.value.update_policy, ready.value))


@phase
def sync_weights(loop: LiveLoop, step: int) -> None:
    """Give the engine the weights of policy version `step`, and check that it has them."""
    record = loop.value.recorder
    record.run(loop.value.sync_weights, step)
    record.run(loop.value.check_sync, f"the sync of step {step}")


@phase
def evaluate(loop: LiveLoop, step: int) -> None:
    """Measure held-out accuracy."""
    record = loop.value.recorder
    record.evaluated(step, record.run(loop.value.evaluate))


@phase
def checkpoint(loop: LiveLoop, step: int) -> None:
    """Save what an interrupted run needs to continue after this step."""
    loop.value.checkpoint(step)


class RolloutsAhead:
    """Task runs of rollouts that are sampled while the policy is updated, one after another."""

    def __init__(self, loop: LiveLoop) -> None:
        self.loop = loop
        self.under_way: dict[int, PrefectFuture[LiveRollout]] = {}

    def sampled(self, step: int) -> LiveRollout:
        """Start what is due with `step`, and wait for its own rollout."""
        for due in self.loop.value.rollouts_due(step):
            before = list(self.under_way.values())[-1:]
            self.under_way[due] = rollout.submit(
                self.loop, due, wait_for=before, return_state=False
            )
        with self.loop.value.recorder.waiting_for_rollouts():
            return self.under_way.pop(step).result()

    def finish(self) -> None:
        """Wait for all of them: the engine's weights may change afterwards."""
        with self.loop.value.recorder.waiting_for_rollouts():
            for future in self.under_way.values():
                future.result()


@flow(name="rl", flow_run_name="{stage}", validate_parameters=False, persist_result=False)
def rl_flow(stage: str, loop: LiveLoop) -> None:
    """All steps of one RL stage, from where the loop stands to its last step."""
    record = loop.value.recorder
    if loop.value.evaluates_before_first_step:
        evaluate(loop, 0)
    ahead = RolloutsAhead(loop) if loop.value.max_staleness else None
    for step in loop.value.remaining_steps():
        record.begin_step(step)
        sampled = ahead.sampled(step) if ahead else rollout(loop, step)
        if record.run(loop.value.take, sampled.value):
            scored = score_rewards(loop, sampled)
            ready = compute_advantages(loop, scored)
            update_policy(loop, ready)
        if ahead:
            ahead.finish()
        sync_weights(loop, step)
        if loop.value.evaluation_is_due(step):
            evaluate(loop, step)
        record.end_step(step)
        if loop.value.checkpoint_is_due(step):
            checkpoint(loop, step)
