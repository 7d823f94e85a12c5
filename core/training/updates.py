"""How a rollout batch is cut into updates, and what they come to."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.math.nucleus import Cut
from posttrain.core.models.sampled_outputs import SampledOutputs
from posttrain.core.training.metrics import MetricSums
from posttrain.core.training.optim import StepReport
from posttrain.core.training.splitting import micro_rows


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """How one rollout batch is cut up. Micro-batches change memory and speed, never the result.

    `temperature` and `cut` are the rollout's: the law that its tokens were sampled from.
    """

    epochs: int
    num_mini_batches: int
    micro_batch_size: int
    temperature: float
    seed: int
    cut: Cut = Cut()
    max_tokens: int | None = None
    skip_idle_rows: bool = True

    def micro_rows(self, batch: RolloutBatch, num_ranks: int = 1) -> list[Tensor]:
        """Row indices of each micro-batch of `batch`."""
        return micro_rows(batch, self.micro_batch_size, self.max_tokens, num_ranks)

    @property
    def updates_per_batch(self) -> int:
        """Optimizer steps taken on each rollout batch."""
        return self.epochs * self.num_mini_batches


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """Metrics of an update, and the log-probs [B, T] of the policy it started from.

    `seen_logprobs` and `seen_entropy` [B, T] are those that the last optimizer step on each row was
    computed from, and `seen_by` [B] is that step's number on this batch, from 0; NaN and -1 for
    rows that none read. `columns` are what the learner filled of the batch besides.
    """

    metrics: dict[str, float]
    old_logprobs: Tensor
    seen_logprobs: Tensor
    seen_entropy: Tensor
    seen_by: Tensor
    columns: dict[str, Tensor]


@dataclass
class Progress:
    """What the updates on one rollout batch have come to so far; begun by `of`.

    `first_mini` is the mini-batch of the first update and `first_seen` what its forward pass saw.
    `products` are what is known of that pass.
    """

    first_logprobs: Tensor | None
    seen_logprobs: Tensor
    seen_entropy: Tensor
    seen_by: Tensor
    first_mini: RolloutBatch | None = None
    first_seen: Tensor | None = None
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

    @property
    def mean_norm(self) -> float:
        """Mean norm of the gradients before clipping."""
        return self.norm_sum / self.num_updates

    def forget_products(self) -> None:
        """The first mini-batch has been through, and the policy moves."""
        if self.products is not None:
            self.products.forget()
            self.products = None

    def took(self, report: StepReport) -> None:
        """Count an optimizer step."""
        self.report = report
        self.norm_sum += report.grad_norm
        self.num_updates += 1
        self.sums.add_scalar("train/skipped_empty", float(report.skipped))
        self.sums.add_scalar("grad/clipped", float(report.grad_clipped))
