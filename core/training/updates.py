"""What an update of the policy is given and returns, and by whom it is made.

`PolicyLearner` is the contract of an RL step with what trains: `Learner` in this process,
`RankedLearner` on ranks. Axes: B rows, T response tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import WeightSource
from posttrain.core.math.nucleus import Cut
from posttrain.core.models.sampled_outputs import SampledOutputs
from posttrain.core.training.forward import ResponseForward
from posttrain.core.training.objective import Objective
from posttrain.core.training.optim import StoredOptimizer
from posttrain.core.training.splitting import Splitting
from posttrain.core.training.teacher_pass import TeacherScores

Check = Callable[[], None]
"""Called between micro-batches; raises to stop."""


def no_check() -> None:
    """A check that never stops anything."""


SLOPES_EVERY = 10
"""Steps between those whose gradients of a distillation loss are measured; the first one is 1."""


@dataclass(frozen=True, slots=True)
class UpdateSettings(Splitting):
    """How the policy is updated on a rollout batch.

    `temperature` and `cut` are the rollout's: the distribution its tokens were sampled from. With
    `token_weights` the gradient weights of tokens are measured.
    """

    temperature: float
    seed: int
    cut: Cut = Cut()
    skip_idle_rows: bool = True
    token_weights: bool = True

    def measures_slopes(self, step: int) -> bool:
        """Whether the rollout batch `step` is one whose d loss / d logits are measured.

        That takes the divergence and its gradient once more, a fifth of an update of a model with
        49,152 tokens.
        """
        return self.token_weights and step % SLOPES_EVERY == 1

    def idle_rows(self, objective: Objective, batch: RolloutBatch, kl_coef: float) -> Tensor:
        """Rows [B] that an update leaves out because they give no gradient."""
        if not self.skip_idle_rows:
            return torch.zeros(len(batch), dtype=torch.bool)
        return objective.idle_rows(batch, kl_coef)


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """Metrics of an update, and the log-probs [B, T] of the policy it started from.

    `seen` is what the last optimizer step on each row was computed from, and `seen_by` [B] is that
    step's number on this batch, from 0; NaN and -1 for rows that none read. Of a distillation loss
    it has the columns of steps that `measures_slopes`, with NaN for the gap where the loss was
    given no logits of the teacher. `first_pass` has the rows [n] that the first optimizer step
    read, and its forward pass over them; None if no row was read, or by a trust region.
    """

    metrics: dict[str, float]
    old_logprobs: Tensor
    seen: ResponseForward
    seen_by: Tensor
    first_pass: tuple[Tensor, ResponseForward] | None = None


class RemotePolicy(WeightSource, Protocol):
    """A policy in other processes than this one, on a cluster."""

    def logprobs(self, batch: RolloutBatch) -> Tensor:
        """Its log-probs [B, T] at temperature 1."""


class PolicyLearner(Protocol):
    """The policy that an RL stage trains. It raises, between micro-batches, when asked to stop."""

    @property
    def model(self) -> PreTrainedModel:
        """The policy in this process, as it was after the last update."""

    @property
    def source(self) -> RemotePolicy | None:
        """The policy's weights, if they are on a cluster and no adapter is trained."""

    @property
    def reference(self) -> PreTrainedModel | None:
        """The reference policy, if it is in this process."""

    @property
    def objective(self) -> Objective:
        """The terms of the loss; its plugins keep the state of the last update."""

    @property
    def settings(self) -> UpdateSettings:
        """How a rollout batch is cut up."""

    @property
    def stored(self) -> StoredOptimizer:
        """What a checkpoint keeps of the policy."""

    @property
    def stored_reference(self) -> StoredOptimizer | None:
        """What a checkpoint keeps of a reference that moves."""

    def update(
        self,
        batch: RolloutBatch,
        step: int,
        kl_coef: float,
        products: SampledOutputs | None = None,
    ) -> UpdateResult:
        """All optimizer steps on a batch that `ColumnFiller.fill_for_update` made ready."""

    def policy_pass(
        self, batch: RolloutBatch, products: SampledOutputs | None = None
    ) -> ResponseForward:
        """The present policy's log-probs, entropy and probability kept by top-k and top-p."""

    def reference_logprobs(self, batch: RolloutBatch) -> Tensor:
        """Log-probs [B, T] of the reference policy."""

    def sum_pi_squared(self, batch: RolloutBatch) -> Tensor:
        """The policy's sum of squared probabilities [B, T] at each response token."""

    def refresh_reference(self) -> None:
        """Make the present policy the reference."""

    def teacher_pass(self, name: str, batch: RolloutBatch, top_k: int) -> TeacherScores:
        """What the teacher `name` says of `batch`; its best `top_k` candidates unless that is 0."""


@dataclass(frozen=True, slots=True)
class KlGuard:
    """Bound on the KL from the rollout's policy (k3, nats per token, on a mini-batch).

    Several updates on one batch drift away from the policy that sampled it. Beyond the bound `stop`
    gives up the rest of the batch's updates, this one included; `lower_rate` multiplies the
    learning rate by `factor` for each update that finds the bound exceeded.
    """

    max_kl: float
    action: Literal["stop", "lower_rate"]
    factor: float = 0.5

    def exceeded(self, kl: float) -> bool:
        """Whether the measured `kl` is beyond the bound."""
        return kl > self.max_kl
