"""Optimizer steps of a stage without a loop of its own, kept in checkpoints as it goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from posttrain.core.training.checkpoint import (
    LoopState,
    is_due,
    load_checkpoint,
    save_checkpoint,
    step_folder,
    trim,
)
from posttrain.core.training.step_record import StepTensors, weight_tensors
from posttrain.pipelines.ranks.trainer import Trainer
from posttrain.pipelines.stage.context import StageContext


@dataclass
class Steps:
    """Counts and records a stage's steps; `history` has the metrics of each one so far."""

    context: StageContext
    trainer: Trainer
    total: int
    checkpoint_every: int
    history: list[dict[str, float]] = field(default_factory=list)
    first: int = 1

    @classmethod
    def begin(
        cls, context: StageContext, trainer: Trainer, total: int, checkpoint_every: int
    ) -> Steps:
        """From the context's checkpoint on, if an interrupted run of the stage has left one."""
        steps = cls(context, trainer, total, checkpoint_every)
        found = context.resume_from
        if found is not None:
            state = load_checkpoint(found, trainer.stored)
            steps.history, steps.first = list(state.history), state.step + 1
            context.reporter.say(f"{context.name}: continues after step {state.step} ({found})")
        context.started(total)
        return steps

    @property
    def resumed(self) -> bool:
        return self.first > 1

    @property
    def remaining(self) -> range:
        return range(self.first, self.total + 1)

    def done(
        self, step: int, metrics: Mapping[str, float], batch: Callable[[], Mapping[str, Tensor]]
    ) -> None:
        """Record a step's metrics, and everything that the next one needs if it is due.

        `batch` makes the tensors that the step was computed from, where they are recorded.
        """
        sink = self.context.steps
        if sink is not None and sink.wants(step):
            weights = weight_tensors(self.trainer.stored, None, step)
            sink.put(step, StepTensors(batch(), weights), metrics)
        self.context.log_step(step, metrics)
        self.history.append({"step": float(step), **metrics})
        keep = self.context.run.keep
        if is_due(step, self.total, self.checkpoint_every, keep):
            folder = step_folder(self.context.checkpoints, step)
            save_checkpoint(folder, self.trainer.stored, LoopState(step, {}, self.history))
            trim(folder.parent, keep)
            self.context.saved_checkpoint(step, folder)
