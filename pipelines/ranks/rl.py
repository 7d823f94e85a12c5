"""The learner and critic of an RL stage on several ranks, used like those of one process."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.core.batch import RolloutBatch
from posttrain.core.cluster.shared import SharedWeights
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.models.loading import load_policy
from posttrain.core.models.sampled_outputs import SampledOutputs
from posttrain.core.training.critic import ValueModel
from posttrain.core.training.forward import ResponseForward
from posttrain.core.training.implicit_prm import ProcessRewards
from posttrain.core.training.optim import StoredOptimizer
from posttrain.core.training.teacher_pass import TeacherScores
from posttrain.core.training.updates import PolicyLearner, UpdateResult
from posttrain.pipelines.ranks.trainer import RankedOptimizer, RankTrainer
from posttrain.pipelines.rl.build import build_objective, update_settings, wants_reference
from posttrain.pipelines.stage.inputs import StageInputs
from posttrain.pipelines.stage.trained import start_training


class RankedLearner:
    """A `PolicyLearner` whose passes and steps are those of the ranks.

    `model` is a copy of theirs: what engines are given that fetch no weights themselves, and what
    is saved. It is brought up to date when it is asked for, while there are ranks. Its forward
    passes are not used, and the reference is in the ranks. `RankTrainer` checks for stops, and
    nothing that sampling computed reaches the ranks.
    """

    reference = None

    def __init__(
        self, trainer: RankTrainer, stage: StageInputs, section: RlStage, model: PreTrainedModel
    ) -> None:
        self._model, self._trainer, self._section = model, trainer, section
        self._is_behind = False
        adapted = section.lora is not None
        self.source = None if adapted or not trainer.on_cluster else RankWeights(trainer, self)
        self.objective = build_objective(stage, section)
        self.settings = update_settings(stage, section)
        self._has_reference = wants_reference(stage, section, self.objective)

    @property
    def stored(self) -> StoredOptimizer:
        """As in `PolicyLearner`."""
        return RankedOptimizer(self._trainer, "policy", self._section.optimizer, self._moved)

    @property
    def stored_reference(self) -> StoredOptimizer | None:
        """As in `PolicyLearner`: the reference, or a teacher that follows the policy."""
        section = self._section
        moves = section.kl.moves and self._has_reference
        moves = moves or any(teacher.weights == "ema" for teacher in section.teachers.values())
        return RankedOptimizer(self._trainer, "reference", section.optimizer) if moves else None

    @property
    def model(self) -> PreTrainedModel:
        """As in `PolicyLearner`."""
        if self._is_behind:
            self._trainer.refresh(self._model)
            self._is_behind = False
        return self._model

    def _moved(self) -> None:
        self._is_behind = True

    def update(
        self,
        batch: RolloutBatch,
        step: int,
        kl_coef: float,
        products: SampledOutputs | None = None,
    ) -> UpdateResult:
        """As in `PolicyLearner`; the plugins here and in the ranks keep the same state."""
        parts = self.objective.stateful()
        result, states = self._trainer.call(
            "update",
            batch.bare(),
            step,
            kl_coef,
            {name: part.state() for name, part in parts.items()},
        )
        for name, part in parts.items():
            part.load_state(states[name])
        self._moved()
        assert isinstance(result, UpdateResult)
        result.metrics["memory/rank_peak_gb"] = self._trainer.call("peak_memory_gb")
        return result

    def policy_pass(
        self, batch: RolloutBatch, products: SampledOutputs | None = None
    ) -> ResponseForward:
        """As in `PolicyLearner`."""
        found: ResponseForward = self._trainer.call("policy", batch.bare())
        return found

    def reference_logprobs(self, batch: RolloutBatch) -> Tensor:
        """As in `PolicyLearner`."""
        found: Tensor = self._trainer.call("reference", batch.bare())
        return found

    def teacher_pass(self, name: str, batch: RolloutBatch, top_k: int) -> TeacherScores:
        """As in `PolicyLearner`."""
        found: TeacherScores = self._trainer.call("teacher", name, batch.bare(), top_k)
        return found

    def sum_pi_squared(self, batch: RolloutBatch) -> Tensor:
        """As in `PolicyLearner`."""
        found: Tensor = self._trainer.call("sum_pi_squared", batch.bare())
        return found

    def refresh_reference(self) -> None:
        """As in `PolicyLearner`."""
        self._trainer.call("refresh_reference")


class RankWeights:
    """The policy's weights where they are: in the ranks, which are on a cluster."""

    def __init__(self, trainer: RankTrainer, learner: RankedLearner) -> None:
        self._trainer, self._learner = trainer, learner

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """As in `WeightSource`."""
        return self._learner.model.state_dict().items()

    def shared(self, dtype: torch.dtype, leave_out: frozenset[str]) -> SharedWeights:
        """As in `WeightSource`: rank 0 gathers them, then puts them into the object store."""
        found: SharedWeights = self._trainer.call("share", dtype, leave_out)
        return found

    def check(self) -> None:
        """As in `WeightSource`."""
        self._trainer.stage.check()

    def logprobs(self, batch: RolloutBatch) -> Tensor:
        """As in `sync_check.RemotePolicy`."""
        found: Tensor = self._trainer.call("probe", batch.bare())
        return found


class RankedCritic:
    """A `ValueModel` whose passes and steps are those of the ranks."""

    def __init__(self, trainer: RankTrainer, section: RlStage) -> None:
        assert section.critic is not None
        self._trainer, self._section = trainer, section.critic

    @property
    def stored(self) -> StoredOptimizer:
        """As in `ValueModel`."""
        return RankedOptimizer(self._trainer, "critic", self._section.optimizer)

    def values(self, batch: RolloutBatch) -> tuple[Tensor, Tensor]:
        """As in `ValueModel`."""
        found: tuple[Tensor, Tensor] = self._trainer.call("values", batch.bare())
        return found

    def update(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        """As in `ValueModel`."""
        found: dict[str, float] = self._trainer.call("update_critic", batch.bare(), step)
        return found


class RankedPrm:
    """A `ProcessRewards` whose passes and steps are those of the ranks."""

    def __init__(self, trainer: RankTrainer, section: RlStage) -> None:
        assert section.implicit_prm is not None
        self._trainer, self._section = trainer, section.implicit_prm

    @property
    def stored(self) -> StoredOptimizer:
        """As in `ProcessRewards`."""
        return RankedOptimizer(self._trainer, "implicit_prm", self._section.optimizer)

    def rewards(self, batch: RolloutBatch) -> Tensor:
        """As in `ProcessRewards`."""
        found: Tensor = self._trainer.call("process_rewards", batch.bare())
        return found

    def update(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        """As in `ProcessRewards`."""
        found: dict[str, float] = self._trainer.call("update_prm", batch.bare(), step)
        return found


def on_ranks(
    stage: StageInputs, section: RlStage, trainer: RankTrainer
) -> tuple[PolicyLearner, ValueModel | None, ProcessRewards | None]:
    """Learner, critic and process reward model of an RL stage, which are in the ranks of
    `trainer`.
    """
    model = load_policy(stage.model_dir, stage.runtime)
    start_training(stage, model, section.lora)
    learner = RankedLearner(trainer, stage, section, model)
    critic = None if section.critic is None else RankedCritic(trainer, section)
    prm = None if section.implicit_prm is None else RankedPrm(trainer, section)
    return learner, critic, prm
