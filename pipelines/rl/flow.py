"""The RL flow: the page to read first. A step is a sequence of phases.

    rollout -> score_rewards -> compute_advantages -> update_policy -> sync_weights
                                                       (+ evaluate, checkpoint when due)

With `max_staleness: k` the rollouts of the next k steps are sampled while `update_policy` runs; all
of them are done before the weights change, so rollout n always has policy max(0, n - 1 - k). With
`schedule: streaming` sampling never ends, and `rollout` takes the first groups that are done.

Prefect's database keeps 18 KB of each task run. So the phases of the first step are task runs
of their own, which shows how a step is made, and each ten later steps share one task run.

The phases pass the live `Rollout` in memory behind an opaque handle: nothing is pickled, cached or
walked. What each phase does is a method of `RlLoop` in `step.py`, which returns what it made with
its metrics; `Recorder.run` times it and records these. The maths lives in `core` and in plugins.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import copy_context
from typing import Any

from prefect import Task, flow, task
from prefect.cache_policies import NO_CACHE

from posttrain.pipelines.rl.live import Live
from posttrain.pipelines.rl.prefect_away import Body, call_flow
from posttrain.pipelines.rl.rollouts import Rollout
from posttrain.pipelines.rl.step import RlLoop

# An optimizer step must never be repeated, so no phase is retried.
phase = task(cache_policy=NO_CACHE, persist_result=False, retries=0)

SHOWN_STEPS = 1
"""Steps at the start of a stage whose phases are task runs of their own."""
BLOCK_STEPS = 10
"""Later steps that share one task run."""

LiveLoop = Live[RlLoop]
LiveRollout = Live[Rollout]
Call = Callable[..., Any]  # `as_task` or `directly`


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
def evaluate_sampled(loop: LiveLoop, step: int) -> None:
    """Measure avg@k and pass@k on a few held-out problems."""
    record = loop.value.recorder
    record.evaluated_sampled(step, record.run(loop.value.evaluate_sampled, step))


@phase
def checkpoint(loop: LiveLoop, step: int) -> None:
    """Save what an interrupted run needs to continue after this step."""
    loop.value.checkpoint(step)


class RolloutsAhead:
    """Rollouts that a thread samples while the policy is updated, one after another."""

    def __init__(self, loop: LiveLoop) -> None:
        self.loop = loop
        self.under_way: dict[int, Future[LiveRollout]] = {}
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollouts")

    def sampled(self, step: int, call: Call) -> LiveRollout:
        """Start what is due with `step`, and wait for its own rollout."""
        for due in self.loop.value.rollouts_due(step):
            context = copy_context()  # a task run belongs to the flow run that it finds there
            self.under_way[due] = self.thread.submit(context.run, call, rollout, self.loop, due)
        with self.loop.value.recorder.waiting_for_rollouts():
            return self.under_way.pop(step).result()

    def finish(self) -> None:
        """Wait for all of them: the engine's weights may change afterwards."""
        with self.loop.value.recorder.waiting_for_rollouts():
            for future in self.under_way.values():
                future.result()

    def close(self) -> None:
        """Wait for the one under way; the others do not start."""
        self.thread.shutdown(cancel_futures=True)


def as_task(phase: Task[..., Any], *arguments: Any) -> Any:
    """Run a phase as a Prefect task run of its own."""
    return phase(*arguments)


def directly(phase: Task[..., Any], *arguments: Any) -> Any:
    """Run a phase within the task run of several steps."""
    return phase.fn(*arguments)


def take_step(loop: LiveLoop, step: int, ahead: RolloutsAhead | None, call: Call) -> None:
    """One step of RL: every phase in its order."""
    record = loop.value.recorder
    record.begin_step(step)
    sampled = ahead.sampled(step, call) if ahead else call(rollout, loop, step)
    if record.run(loop.value.take, sampled.value):
        scored = call(score_rewards, loop, sampled)
        ready = call(compute_advantages, loop, scored)
        call(update_policy, loop, ready)
    if ahead:
        ahead.finish()
    call(sync_weights, loop, step)
    if loop.value.evaluation_is_due(step):
        call(evaluate, loop, step)
    if loop.value.sampled_evaluation_is_due(step):
        call(evaluate_sampled, loop, step)
    record.end_step(step)
    if loop.value.checkpoint_is_due(step):
        call(checkpoint, loop, step)


@task(
    task_run_name="steps {first} to {last}", cache_policy=NO_CACHE, persist_result=False, retries=0
)
def several_steps(loop: LiveLoop, first: int, last: int, ahead: Live[RolloutsAhead | None]) -> None:
    """Steps that Prefect shows as one task run."""
    for step in range(first, last + 1):
        take_step(loop, step, ahead.value, directly)


@flow(name="rl", flow_run_name="{stage}", validate_parameters=False, persist_result=False)
def rl_flow(stage: str, loop: LiveLoop, body: Live[Body]) -> None:
    """All steps of one RL stage, from where the loop stands to its last step."""
    with body.value.running(), ExitStack() as stack:
        if loop.value.evaluates_before_first_step:
            evaluate(loop, 0)
        if loop.value.first_step == 1 and loop.value.sampled_evaluation_is_due(0):
            evaluate_sampled(loop, 0)
        ahead = RolloutsAhead(loop) if loop.value.steps_ahead else None
        if ahead:
            stack.callback(ahead.close)
        steps = loop.value.remaining_steps()
        for step in steps[:SHOWN_STEPS]:
            take_step(loop, step, ahead, as_task)
        for block in batched_steps(steps[SHOWN_STEPS:]):
            several_steps(loop, block[0], block[-1], Live(ahead))


def batched_steps(steps: range) -> list[range]:
    """The steps in blocks of `BLOCK_STEPS`, the last one shorter."""
    return [steps[at : at + BLOCK_STEPS] for at in range(0, len(steps), BLOCK_STEPS)]


def run_steps(stage: str, loop: RlLoop) -> None:
    """Run `rl_flow`; without a flow run where Prefect's server does not answer."""
    body = Body()
    call_flow(rl_flow, body, stage, Live(loop), Live(body), optional=True)
