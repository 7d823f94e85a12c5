"""How a rollout batch is cut into updates, and what they come to."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.math.nucleus import Cut
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
    """Metrics of an update, and the log-probs [B, T] of the policy it started from."""

    metrics: dict[str, float]
    old_logprobs: Tensor


@dataclass
class Progress:
    """What the updates on one rollout batch have come to so far.

    `first_mini` is the mini-batch of the first update and `first_seen` what its forward pass saw.
    """

    first_logprobs: Tensor | None
    first_mini: RolloutBatch | None = None
    first_seen: Tensor | None = None
    sums: MetricSums = field(default_factory=MetricSums)
    report: StepReport | None = None
    norm_sum: float = 0.0
    rate_factor: float = 1.0
    num_updates: int = 0

    @property
    def mean_norm(self) -> float:
        """Mean norm of the gradients before clipping."""
        return self.norm_sum / self.num_updates

    def took(self, report: StepReport) -> None:
        """Count an optimizer step."""
        self.report = report
        self.norm_sum += report.grad_norm
        self.num_updates += 1
        self.sums.add_scalar("train/skipped_empty", float(report.skipped))
        self.sums.add_scalar("grad/clipped", float(report.grad_clipped))
