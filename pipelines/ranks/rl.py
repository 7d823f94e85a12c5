"""The learner and critic of an RL stage on several ranks, used like those of one process."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from transformers import PreTrainedModel

from posttrain.core.batch import RolloutBatch
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.math.nucleus import Cut
from posttrain.core.models.loading import load_policy
from posttrain.core.models.sampled_outputs import SampledOutputs
from posttrain.core.training.critic import Critic
from posttrain.core.training.forward import UNCUT, ResponseForward
from posttrain.core.training.learner import Learner
from posttrain.core.training.optim import StoredOptimizer
from posttrain.core.training.updates import UpdateResult
from posttrain.core.training.value_phase import ValuePhase
from posttrain.pipelines.ranks.trainer import RankedOptimizer, RankTrainer
from posttrain.pipelines.stages.inputs import StageInputs
from posttrain.pipelines.stages.rl_parts import (
    build_objective,
    critic_settings,
    update_settings,
    value_phase,
)
from posttrain.pipelines.stages.trained import start_training

Check = Callable[[], None]


def _nothing() -> None:
    """Ranks are told to stop by their caller."""


class RankedLearner(Learner):
    """A learner whose passes and steps are those of the ranks.

    `model` is a copy of theirs as it was after the last update: what engines are given, and what is
    saved. Its forward passes are not used, and there is no reference beside it.
    """

    def __init__(
        self, trainer: RankTrainer, stage: StageInputs, section: RlStage, model: PreTrainedModel
    ) -> None:
        # Not that of `Learner`, whose optimizer, reference and terms are in the ranks.
        self.model, self._trainer, self._section = model, trainer, section
        self.objective, self.settings = (
            build_objective(stage, section),
            update_settings(stage, section),
        )
        self.reference = None

    @property
    def stored(self) -> StoredOptimizer:
        """As in `Learner`."""
        section, trainer = self._section.optimizer, self._trainer
        return RankedOptimizer(trainer, "policy", section, lambda: trainer.refresh(self.model))

    def update(
        self,
        batch: RolloutBatch,
        step: int,
        kl_coef: float,
        check: Check = _nothing,
        products: SampledOutputs | None = None,
    ) -> UpdateResult:
        """As in `Learner`; the ranks' losses keep the same state as the ones here.

        `products` are in this process, and ranks compute theirs again.
        """
        result, states = self._trainer.call("update", batch.bare(), step, kl_coef)
        for term, state in zip(self.objective.terms, states, strict=True):
            term.loss.load_state(state)
        self._trainer.refresh(self.model)
        assert isinstance(result, UpdateResult)
        result.metrics["memory/rank_peak_gb"] = self._trainer.call("peak_memory_gb")
        return result

    def forward_only(
        self,
        model: PreTrainedModel,
        batch: RolloutBatch,
        check: Check = _nothing,
        cut: Cut = UNCUT,
        products: SampledOutputs | None = None,
    ) -> ResponseForward:
        """As in `Learner`, of the policy; `products` are not the ranks'."""
        found: ResponseForward = self._trainer.call("policy", batch.bare(), cut)
        return found

    def reference_logprobs(self, batch: RolloutBatch, check: Check = _nothing) -> Tensor:
        """As in `Learner`."""
        found: Tensor = self._trainer.call("reference", batch.bare())
        return found

    def sum_pi_squared(self, batch: RolloutBatch, check: Check = _nothing) -> Tensor:
        """As in `Learner`."""
        found: Tensor = self._trainer.call("sum_pi_squared", batch.bare())
        return found

    def refresh_reference(self) -> None:
        """As in `Learner`."""
        self._trainer.call("refresh_reference")


class RankedCritic(Critic):
    """A critic whose passes and steps are those of the ranks."""

    def __init__(self, trainer: RankTrainer, stage: StageInputs, section: RlStage) -> None:
        assert section.critic is not None
        self._trainer, self._section = trainer, section.critic
        self.settings = critic_settings(stage, section)

    @property
    def stored(self) -> StoredOptimizer:
        """As in `Critic`."""
        return RankedOptimizer(self._trainer, "critic", self._section.optimizer)

    def values(self, batch: RolloutBatch, check: Check = _nothing) -> tuple[Tensor, Tensor]:
        """As in `Critic`."""
        found: tuple[Tensor, Tensor] = self._trainer.call("values", batch.bare())
        return found

    def update(self, batch: RolloutBatch, step: int, check: Check = _nothing) -> dict[str, float]:
        """As in `Critic`."""
        found: dict[str, float] = self._trainer.call("update_critic", batch.bare(), step)
        return found


def on_ranks(
    stage: StageInputs, section: RlStage, trainer: RankTrainer
) -> tuple[Learner, ValuePhase | None]:
    """Learner and critic of an RL stage whose models are in the ranks of `trainer`."""
    model = load_policy(stage.model_dir, stage.runtime)
    start_training(stage, model, section.lora)
    trainer.refresh(model)
    learner = RankedLearner(trainer, stage, section, model)
    if section.critic is None:
        return learner, None
    return learner, value_phase(RankedCritic(trainer, stage, section), section.critic)
