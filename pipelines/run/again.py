"""Steps of a past stage taken again, from what it read: nothing of them is recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from posttrain.core.contracts import StageOutput
from posttrain.pipelines.rl.step import RlLoop
from posttrain.pipelines.stage.context import StageContext
from posttrain.pipelines.stages.preference import run_preference
from posttrain.pipelines.stages.process_reward_model import run_process_reward_model
from posttrain.pipelines.stages.reward_model import run_reward_model
from posttrain.pipelines.stages.rl import opened_loop
from posttrain.pipelines.stages.sft import run_sft

_RUNNERS: dict[str, Callable[[StageContext], StageOutput]] = {
    "sft": run_sft,
    "reward_model": run_reward_model,
    "process_reward_model": run_process_reward_model,
    "preference": run_preference,
}


class ReplayContext(StageContext):
    """A stage's context that reports to nobody: listeners and MLflow know these steps already."""

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the step, no more."""
        self.reporter.step_done(self.name, step, metrics)


def take_steps_again(
    context: StageContext, until: int, reached: Callable[[RlLoop], None] | None = None
) -> None:
    """The stage's steps up to `until`; where a stage has no loop, its context or its sink ends it.

    `reached` is given the loop of a stage that has one, after that step.
    """
    kind = context.stage.kind
    if kind in _RUNNERS:
        _RUNNERS[kind](context)
        return
    with opened_loop(context) as loop:
        context.started(until)
        record = loop.recorder
        for step in range(loop.first_step, until + 1):
            record.begin_step(step)
            for due in loop.rollouts_due(step):
                loop.rollouts.sample(due)
            rollout = loop.rollouts.sample(step)  # which may have waited since an earlier step
            if record.run(loop.take, rollout):
                scored = record.run(loop.score_rewards, rollout)
                ready = record.run(loop.compute_advantages, scored)
                record.updated(record.run(loop.update_policy, ready))
            record.run(loop.sync_weights, step)
            record.run(loop.check_sync, f"the sync of step {step}")
            record.end_step(step)
        if reached is not None:
            reached(loop)
