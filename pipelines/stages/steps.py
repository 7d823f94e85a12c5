"""Optimizer steps of a stage without a loop of its own, kept in checkpoints as it goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from torch import Tensor

from posttrain.core.config.preference_stages import (
    PreferenceStage,
    ProcessRewardModelStage,
    RewardModelStage,
)
from posttrain.core.config.sft_stage import SftStage
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import ConfigError
from posttrain.core.training.checkpoint import (
    Checkpoints,
    LoopState,
    load_checkpoint,
    save_checkpoint,
)
from posttrain.core.training.finite import FiniteGuard
from posttrain.core.training.readings import StepReadings
from posttrain.core.training.step_record import POLICY, StepTensors, weight_tensors
from posttrain.pipelines.ranks.trainer import Trainer
from posttrain.pipelines.rl.step import Stateful, load_parts
from posttrain.pipelines.stage.context import StageContext
from posttrain.pipelines.stages.answer_evidence import evidence_of

TRAINED = SftStage | PreferenceStage | RewardModelStage | ProcessRewardModelStage
"""Stages without a loop of their own."""


@dataclass
class Steps:
    """Counts and records a stage's steps; `history` has the metrics of each one so far.

    `kept` is what a checkpoint keeps in addition to model, optimizer and history.
    """

    context: StageContext
    trainer: Trainer
    total: int
    checkpoints: Checkpoints
    guard: FiniteGuard
    history: list[dict[str, float]] = field(default_factory=list)
    first: int = 1
    kept: Mapping[str, Stateful] = field(default_factory=dict)
    readings: StepReadings | None = None
    """What the step that was taken last was computed from, where evidence is kept."""

    @classmethod
    def begin(
        cls,
        context: StageContext,
        trainer: Trainer,
        total: int,
        kept: Mapping[str, Stateful] | None = None,
    ) -> Steps:
        """From the context's checkpoint on, if an interrupted run of the stage has left one."""
        stage = context.stage
        assert isinstance(stage, TRAINED)
        guard = FiniteGuard(context.name, stage.optimizer, context.warn)
        keeper = context.keeper(total, stage.checkpoint_every)
        steps = cls(context, trainer, total, keeper, guard, kept=kept or {})
        found = context.resume_from
        if found is not None:
            state = load_checkpoint(found, trainer.stored)
            steps.history, steps.first = list(state.history), state.step + 1
            load_parts(steps.kept, state, forked=context.begins_fork_at(state.step))
            context.reporter.say(f"{context.name}: continues after step {state.step} ({found})")
        if context.fork is not None and total <= context.fork.step:
            raise ConfigError(
                f"stages.{context.name}: its data make {total} step(s), and the first "
                f"{context.fork.step} are shared (fork.step), so none is left to compute; raise "
                "steps or epochs, or fork earlier"
            )
        context.started(total)
        return steps

    @cached_property
    def tokenizer(self) -> ChatTokenizer:
        """Of the model that is trained, for the texts of evidence."""
        return self.context.tokenizer()

    @property
    def resumed(self) -> bool:
        return self.first > 1

    @property
    def remaining(self) -> range:
        return range(self.first, self.total + 1)

    def take(self, rows: object) -> dict[str, float]:
        """One optimizer step on `rows`, as the trainer's `step` takes them; returns its metrics."""
        metrics: dict[str, float]
        keep = self.context.evidence is not None
        metrics, self.readings = self.trainer.call("step", rows, keep)
        return metrics

    def done(
        self,
        step: int,
        metrics: Mapping[str, float],
        batch: Callable[[], Mapping[str, Tensor]],
        keys: Sequence[str],
    ) -> None:
        """Record a step's metrics, and everything that the next one needs if it is due.

        `batch` makes the tensors that the step was computed from, where they are recorded; `keys`
        name its rows. Raises `RunError` where numbers that are not finite end the stage.
        """
        if "grad/non_finite" in metrics:
            found = self.trainer.stored.take_non_finite()
            failure = self.guard.judge(step, found, self.history, keys)
            if failure is not None:
                self.context.log_step(step, metrics)
                raise failure
        sink = self.context.steps
        if sink is not None and sink.wants(step):
            weights = weight_tensors({POLICY: self.trainer.stored}, step)
            sink.put(step, StepTensors(batch(), weights), metrics)
        if self.context.evidence is not None and self.readings is not None:
            self.context.evidence.put(evidence_of(step, self.readings, keys, self.tokenizer))
            self.readings = None
        self.context.log_step(step, metrics)
        self.history.append({"step": float(step), **metrics})
        if self.checkpoints.is_due(step):
            parts = {name: part.state() for name, part in self.kept.items()}
            state = LoopState(step, parts, self.history)

            def save(folder: Path) -> None:
                save_checkpoint(folder, self.trainer.stored, state)

            self.context.saved_checkpoint(step, self.checkpoints.write(step, save))
