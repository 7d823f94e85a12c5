"""The learner: one rollout batch in, optimizer steps out, exact however the work is split.

Every term of the loss is divided by counts of the *global* mini-batch, taken before its first
micro-batch, so the summed micro-batch gradients equal the gradient of one big batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import Aggregator, Counts, KlEstimator, PolicyLoss, TokenLoss
from posttrain.core.runtime.seeding import generator
from posttrain.core.training.forward import ResponseForward, response_logprobs
from posttrain.core.training.metrics import MetricSums, mismatch_metrics
from posttrain.core.training.optim import MasterOptimizer


@dataclass(frozen=True, slots=True)
class LossTerms:
    """The plugins that make the loss, and the KL term's estimator (None = no KL in the loss)."""

    policy_loss: PolicyLoss[Any]
    aggregator: Aggregator[Any]
    kl: KlEstimator[Any] | None
    entropy_coef: float


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """How one rollout batch is cut up. `micro_batch_size` changes memory, never the result."""

    epochs: int
    num_mini_batches: int
    micro_batch_size: int
    temperature: float
    seed: int

    @property
    def updates_per_batch(self) -> int:
        """Optimizer steps taken on each rollout batch."""
        return self.epochs * self.num_mini_batches


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """Metrics of an update, and the log-probs [B, T] of the policy it started from."""

    metrics: dict[str, float]
    old_logprobs: Tensor


class Learner:
    """Owns the policy, its frozen reference (when a KL term needs it) and the optimizer."""

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: MasterOptimizer,
        terms: LossTerms,
        settings: UpdateSettings,
        reference: PreTrainedModel | None = None,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.terms, self.settings, self.reference = terms, settings, reference

    def update(
        self,
        batch: RolloutBatch,
        step: int,
        kl_coef: float,
        check: Callable[[], None] = lambda: None,
    ) -> UpdateResult:
        """All epochs and mini-batches over `batch`.

        Needs `advantages`, and fills `old_logprobs` itself: from a forward pass before the first
        update, or, when there is only one update, from that update's own forward, which is the
        same policy. `check` runs between micro-batches (it raises to stop).
        """
        batch.require(["advantages", "mask"], "the learner")
        settings = self.settings
        if settings.updates_per_batch > 1 and batch.old_logprobs is None:
            old = self.forward_only(self.model, batch, check)
            batch = batch.with_columns(old_logprobs=old.logprobs, entropy=old.entropy)
        if kl_coef > 0 and self.terms.kl is not None and batch.ref_logprobs is None:
            batch = batch.with_columns(ref_logprobs=self.reference_logprobs(batch, check))
        sums = MetricSums()
        norms: list[float] = []
        report, first_logprobs = None, batch.old_logprobs
        for epoch in range(settings.epochs):
            for mini in self._mini_batches(batch, step, epoch):
                seen = self._accumulate(mini, kl_coef, sums, check)
                first_logprobs = seen if first_logprobs is None else first_logprobs
                report = self.optimizer.step()
                norms.append(report.grad_norm)
                sums.add_scalar("train/skipped_empty", float(report.skipped))
                sums.add_scalar("grad/clipped", float(report.grad_clipped))
        assert report is not None and first_logprobs is not None, "at least one update is made"
        metrics = sums.result()
        num_updates = settings.updates_per_batch
        for name in [n for n in metrics if n.startswith("loss/")] + ["grad/clipped"]:
            metrics[name] /= num_updates
        metrics |= {"grad/norm": sum(norms) / len(norms), "lr": report.learning_rate}
        metrics |= mismatch_metrics(first_logprobs, batch.rollout_logprobs, batch.mask)
        return UpdateResult(metrics, first_logprobs)

    def reference_logprobs(
        self, batch: RolloutBatch, check: Callable[[], None] = lambda: None
    ) -> Tensor:
        """Log-probs [B, T] of the frozen reference policy."""
        assert self.reference is not None, "a KL term needs a reference model"
        return self.forward_only(self.reference, batch, check).logprobs

    @torch.no_grad()
    def forward_only(
        self, model: PreTrainedModel, batch: RolloutBatch, check: Callable[[], None]
    ) -> ResponseForward:
        """Log-probs and entropy [B, T] of `model` without gradient, in micro-batches."""
        parts = []
        for rows in self._micro_rows(batch):
            check()
            micro = batch.select(rows)
            parts.append(response_logprobs(model, micro, temperature=self.settings.temperature))
        return ResponseForward(
            torch.cat([p.logprobs for p in parts]).cpu(),
            torch.cat([p.entropy for p in parts]).cpu(),
        )

    def _mini_batches(self, batch: RolloutBatch, step: int, epoch: int) -> Iterator[RolloutBatch]:
        """The batch's groups in `num_mini_batches` parts, shuffled anew in every epoch."""
        if self.settings.num_mini_batches == 1:
            yield batch
            return
        groups = list(batch.groups())
        order = torch.randperm(
            len(groups), generator=generator(self.settings.seed, "mini_batches", step, epoch)
        ).tolist()
        for part in torch.tensor(order).tensor_split(self.settings.num_mini_batches):
            yield batch.select(torch.cat([groups[i] for i in part.tolist()]))

    def _micro_rows(self, batch: RolloutBatch) -> Iterator[Tensor]:
        """Row indices of each micro-batch.

        Rows stay in order, so a group's rows mostly share one micro-batch and one prompt forward.
        """
        yield from torch.split(torch.arange(len(batch)), self.settings.micro_batch_size)

    def _accumulate(
        self, mini: RolloutBatch, kl_coef: float, sums: MetricSums, check: Callable[[], None]
    ) -> Tensor:
        """Forward and backward over the micro-batches of one mini-batch.

        Returns the log-probs [B, T] that the forward passes saw; rows without loss stay 0.
        """
        seen = torch.zeros_like(mini.rollout_logprobs)
        row_tokens = mini.mask.sum(dim=1)
        counts = Counts(float(row_tokens.sum()), float((row_tokens > 0).sum()))
        if counts.num_tokens == 0:
            return seen
        for rows in self._micro_rows(mini):
            check()
            micro = mini.select(rows)
            if not micro.mask.any():
                continue
            out = response_logprobs(self.model, micro, temperature=self.settings.temperature)
            seen[rows] = out.logprobs.detach().to(seen)
            if micro.old_logprobs is None:
                micro = micro.with_columns(old_logprobs=out.logprobs.cpu())
            self._loss(out, micro, counts, kl_coef, sums).backward()  # type: ignore[no-untyped-call]
        return seen

    def _loss(
        self,
        out: ResponseForward,
        micro: RolloutBatch,
        counts: Counts,
        kl_coef: float,
        sums: MetricSums,
    ) -> Tensor:
        """This micro-batch's share of the loss; shares add up to the mini-batch's loss."""
        logprobs, mask, terms = out.logprobs.cpu(), micro.mask, self.terms
        token_loss = terms.policy_loss.token_loss(logprobs, micro)
        policy = terms.aggregator.aggregate(token_loss, mask, counts)
        total = policy
        sums.add_scalar("loss/policy", policy.detach())
        if kl_coef > 0 and terms.kl is not None:
            kl = terms.kl.kl(logprobs, micro.column("ref_logprobs"))
            kl_loss = kl_coef * terms.aggregator.aggregate(TokenLoss(kl, mask), mask, counts)
            total = total + kl_loss
            sums.add_scalar("loss/kl", kl_loss.detach())
        entropy = out.entropy.cpu()
        if terms.entropy_coef > 0:
            bonus = terms.aggregator.aggregate(TokenLoss(entropy, mask), mask, counts)
            total = total - terms.entropy_coef * bonus
            sums.add_scalar("loss/entropy", -terms.entropy_coef * bonus.detach())
        sums.add_scalar("loss/total", total.detach())
        sums.add("entropy/mean", entropy, mask)
        if micro.ref_logprobs is not None:
            gap = (logprobs - micro.ref_logprobs).detach()
            sums.add("kl/ref_k1", gap, mask)
            sums.add("kl/ref_k3", (-gap).clamp(-20, 20).exp() - 1 + gap, mask)
        for name, value in token_loss.metrics.items():
            sums.add("ratio/mean" if name == "ratio" else name, value, mask)
            if name == "ratio":
                sums.add_extremes("ratio", value, mask)
        return total
