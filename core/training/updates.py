"""What an update of the policy is given and returns, what is counted on the way, and by whom.

`PolicyLearner` is the contract of an RL step with what trains: `Learner` in this process,
`RankedLearner` on ranks. Axes: B rows, T response tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import WeightSource
from posttrain.core.math.nucleus import Cut
from posttrain.core.models.sampled_outputs import SampledOutputs
from posttrain.core.training.distillation import TeacherScores
from posttrain.core.training.finite import note_suspects
from posttrain.core.training.forward import ResponseForward
from posttrain.core.training.metrics import MetricSums
from posttrain.core.training.objective import MicroLoss, Objective, positive_share
from posttrain.core.training.optim import StepReport, StoredOptimizer
from posttrain.core.training.splitting import micro_rows

Check = Callable[[], None]
"""Called between micro-batches; raises to stop."""


def no_check() -> None:
    """A check that never stops anything."""


SLOPES_EVERY = 10
"""Steps between those whose gradients of a distillation loss are measured; the first one is 1."""


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """How one rollout batch is cut up. Micro-batches change memory and speed, never the result.

    `temperature` and `cut` are the rollout's: the distribution its tokens were sampled from. With
    `token_weights` the gradient weights of tokens are measured.
    """

    epochs: int
    num_mini_batches: int
    micro_batch_size: int
    temperature: float
    seed: int
    cut: Cut = Cut()
    max_tokens: int | None = None
    skip_idle_rows: bool = True
    token_weights: bool = True

    def measures_slopes(self, step: int) -> bool:
        """Whether the rollout batch `step` is one whose d loss / d logits are measured.

        That takes the divergence and its gradient once more, a fifth of an update of a model with
        49,152 tokens.
        """
        return self.token_weights and step % SLOPES_EVERY == 1

    def micro_rows(self, batch: RolloutBatch, num_ranks: int = 1) -> list[Tensor]:
        """Row indices of each micro-batch of `batch`."""
        return micro_rows(batch, self.micro_batch_size, self.max_tokens, num_ranks)

    def idle_rows(self, objective: Objective, batch: RolloutBatch, kl_coef: float) -> Tensor:
        """Rows [B] that an update leaves out because they give no gradient."""
        if not self.skip_idle_rows:
            return torch.zeros(len(batch), dtype=torch.bool)
        return objective.idle_rows(batch, kl_coef)

    @property
    def updates_per_batch(self) -> int:
        """Optimizer steps taken on each rollout batch."""
        return self.epochs * self.num_mini_batches


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """Metrics of an update, and the log-probs [B, T] of the policy it started from.

    `seen_logprobs` and `seen_entropy` [B, T] are those that the last optimizer step on each row was
    computed from, and `seen_by` [B] is that step's number on this batch, from 0; NaN and -1 for
    rows that none read. `first_pass` has the rows [n] that the first optimizer step read, and its
    forward pass over them; None if no row was read, or by a trust region. `seen_divergence` and
    `seen_slope` [B, T] are the values of the distillation loss and the norms of their
    d loss / d logits in the same passes, where there is one, and `seen_gap` the teacher's log-prob
    minus the policy's (NaN where the loss was given no logits of the teacher).
    """

    metrics: dict[str, float]
    old_logprobs: Tensor
    seen_logprobs: Tensor
    seen_entropy: Tensor
    seen_by: Tensor
    first_pass: tuple[Tensor, ResponseForward] | None = None
    seen_divergence: Tensor | None = None
    seen_slope: Tensor | None = None
    seen_gap: Tensor | None = None


class RemotePolicy(WeightSource, Protocol):
    """A policy in other processes than this one, on a cluster."""

    def logprobs(self, batch: RolloutBatch) -> Tensor:
        """Its log-probs [B, T] at temperature 1."""


class PolicyLearner(Protocol):
    """The policy that an RL stage trains."""

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
        check: Check = no_check,
        products: SampledOutputs | None = None,
    ) -> UpdateResult:
        """All optimizer steps on a batch that `ColumnFiller.fill_for_update` made ready."""

    def policy_pass(
        self, batch: RolloutBatch, check: Check = no_check, products: SampledOutputs | None = None
    ) -> ResponseForward:
        """The present policy's log-probs, entropy and probability kept by top-k and top-p."""

    def reference_logprobs(self, batch: RolloutBatch, check: Check = no_check) -> Tensor:
        """Log-probs [B, T] of the reference policy."""

    def sum_pi_squared(self, batch: RolloutBatch, check: Check = no_check) -> Tensor:
        """The policy's sum of squared probabilities [B, T] at each response token."""

    def refresh_reference(self) -> None:
        """Make the present policy the reference."""

    def teacher_pass(
        self, name: str, batch: RolloutBatch, top_k: int, check: Check = no_check
    ) -> TeacherScores:
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


@dataclass
class Progress:
    """What the updates on one rollout batch have come to so far; begun by `of`.

    `products` are what is known of the first optimizer step's pass.
    """

    first_logprobs: Tensor | None
    seen_logprobs: Tensor
    seen_entropy: Tensor
    seen_by: Tensor
    first_pass: tuple[Tensor, ResponseForward] | None = None
    seen_divergence: Tensor | None = None
    seen_slope: Tensor | None = None
    seen_gap: Tensor | None = None
    sums: MetricSums = field(default_factory=MetricSums)
    report: StepReport | None = None
    norm_sum: float = 0.0
    rate_factor: float = 1.0
    num_updates: int = 0
    products: SampledOutputs | None = None

    @classmethod
    def of(cls, batch: RolloutBatch, products: SampledOutputs | None = None) -> Progress:
        """Before the first update."""
        nothing = torch.full(batch.mask.shape, float("nan"))
        unread = torch.full((len(batch),), -1)
        return cls(batch.old_logprobs, nothing, nothing.clone(), unread, products=products)

    def saw(self, rows: Tensor, logprobs: Tensor, entropy: Tensor | None, number: int) -> None:
        """Note what the update `number` read in `rows` [n] of the batch: both are [n, T]."""
        self.seen_logprobs[rows] = logprobs.to(self.seen_logprobs)
        if entropy is not None:
            self.seen_entropy[rows] = entropy.to(self.seen_entropy)
        self.seen_by[rows] = number

    def saw_distilled(self, rows: Tensor, read: ResponseForward) -> None:
        """Note what the distillation loss was [n, T] in `rows` of the batch."""
        for name in ("divergence", "slope", "gap"):
            found, kept = getattr(read, name), getattr(self, f"seen_{name}")
            if found is None:
                continue
            if kept is None:
                kept = torch.full_like(self.seen_logprobs, float("nan"))
                setattr(self, f"seen_{name}", kept)
            kept[rows] = found.to(kept)

    def forget_products(self) -> None:
        """The first mini-batch has been through, and the policy moves."""
        if self.products is not None:
            self.products.forget()
            self.products = None

    def took(self, report: StepReport, own: MetricSums) -> None:
        """Count an optimizer step with the metrics of its mini-batch.

        Metrics of a step that is skipped, because its numbers are not finite, count nowhere.
        """
        self.report = report
        if report.non_finite:
            self.sums.add_scalar("grad/non_finite", 1.0)
            return
        self.sums.merge(own)
        self.norm_sum += report.grad_norm
        self.num_updates += 1
        self.sums.add_scalar("train/skipped_empty", float(report.skipped))
        self.sums.add_scalar("grad/clipped", float(report.grad_clipped))

    def metrics(self) -> dict[str, float]:
        """Of all updates so far; what sums over the parts of an update is given per update."""
        metrics = positive_share(self.sums.result())
        for name in [n for n in metrics if n.startswith("loss/")] + ["grad/clipped"]:
            if name in metrics:
                metrics[name] /= max(1, self.num_updates)
        metrics["train/updates"] = float(self.num_updates)
        if self.report is not None:
            if self.num_updates:
                metrics["grad/norm"] = self.norm_sum / self.num_updates
            metrics["lr"] = self.report.learning_rate
        return metrics


def record_micro(
    sums: MetricSums, loss: MicroLoss, out: ResponseForward, micro: RolloutBatch, rows: Tensor
) -> None:
    """Add a micro-batch's share of every metric; `rows` [n] are its rows in the mini-batch."""
    mask = micro.mask
    note_suspects(sums, loss.total, rows.tolist(), out.logprobs, micro.advantages)
    for name, value in (*loss.parts.items(), *loss.pulls.items()):
        sums.add_scalar(name, value)
    sums.add_scalar("loss/total", loss.total.detach())
    sums.add("entropy/mean", out.entropy.cpu(), mask)
    sums.add("entropy/approx", -out.logprobs.detach().cpu(), mask)
    if micro.ref_logprobs is not None:
        gap = out.logprobs.detach().cpu() - micro.ref_logprobs
        sums.add("kl/ref_k1", gap, mask)
        sums.add("kl/ref_k3", (-gap).clamp(-20, 20).exp() - 1 + gap, mask)
    for name, (value, where) in loss.tokens.items():
        if name == "ratio":
            sums.add("ratio/mean", value, where)
            sums.add_extremes("ratio", value, where)
        else:
            sums.add(name, value, where)
