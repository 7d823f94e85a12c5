"""The implicit process reward model of an RL stage: a language model trained on outcomes alone.

Its log-ratio to the frozen reference, summed over a response, is the logit of a right answer, so
that each token's part of the sum is a reward for that token. Axes: B rows, T response tokens.
Source: PRIME, arXiv:2502.01456.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import PreTrainedModel

from posttrain.core.batch import RolloutBatch
from posttrain.core.math.masking import masked
from posttrain.core.training.finite import note_suspects
from posttrain.core.training.forward import UNCUT, forward_only, response_logprobs
from posttrain.core.training.metrics import MetricSums
from posttrain.core.training.optim import MasterOptimizer, StoredOptimizer
from posttrain.core.training.ranks import ALONE, Ranks, add_gradients
from posttrain.core.training.splitting import Splitting
from posttrain.core.training.updates import Check, no_check


@dataclass(frozen=True, slots=True, kw_only=True)
class PrmSettings(Splitting):
    """How the model is trained on a rollout batch.

    `temperature` is that of sampling, at which the reference's log-probs are too.
    """

    beta: float
    temperature: float
    seed: int


class ProcessRewards(Protocol):
    """An implicit process reward model: `ImplicitPrm` here, `RankedPrm` on ranks."""

    @property
    def stored(self) -> StoredOptimizer:
        """What a checkpoint keeps of it."""

    def rewards(self, batch: RolloutBatch) -> Tensor:
        """q [B, T] of each sampled token under the present model."""

    def update(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        """Fit the model to the verdicts `acc` [B] of `batch`."""


class ImplicitPrm:
    """q_t = beta (log p(y_t) - log p_ref(y_t)), and the update of p on whether answers are right.

    It minimises the mean over responses of the cross entropy between sigmoid(sum_t q_t) and the
    verdict. `batch` needs `ref_logprobs`; responses without a verdict or a token are left out.
    `check` runs between micro-batches (it raises to stop).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: MasterOptimizer,
        settings: PrmSettings,
        ranks: Ranks = ALONE,
        check: Check = no_check,
    ) -> None:
        self.model, self.optimizer, self.settings = model, optimizer, settings
        self.ranks, self.check = ranks, check

    @property
    def stored(self) -> StoredOptimizer:
        """As in `ProcessRewards`."""
        return self.optimizer

    def rewards(self, batch: RolloutBatch) -> Tensor:
        """As in `ProcessRewards`; 0 where `response_mask` is."""
        settings = self.settings
        found = forward_only(
            self.model,
            batch,
            settings.micro_batch_size,
            settings.temperature,
            self.check,
            UNCUT,
            settings.max_tokens,
            self.ranks,
        )
        return self._rewards(found.logprobs, batch)

    def _rewards(self, logprobs: Tensor, batch: RolloutBatch) -> Tensor:
        gap = logprobs - batch.column("ref_logprobs").to(logprobs)
        return self.settings.beta * masked(gap, batch.response_mask)

    def update(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        """As in `ProcessRewards`; metrics of before each optimizer step, none without verdicts."""
        batch.require(["acc", "ref_logprobs"], "the implicit process reward model")
        settings, sums = self.settings, MetricSums()
        parts = settings.mini_batches(batch, settings.seed, "prm_mini_batches", step)
        for rows, mini in parts:
            judged = mini.response_mask.bool().any(dim=1) & ~mini.column("acc").isnan()
            if not judged.any():
                continue
            own = self._accumulate(mini, judged)
            loss = own.mean("loss/prm", default=0.0)
            report = self.optimizer.step(loss=loss, rows=own.blamed(rows))
            if report.non_finite:
                sums.add_scalar("prm/non_finite", 1.0)
                continue
            sums.add_means(
                {
                    **own.result(),
                    "prm/grad_norm": report.grad_norm,
                    "prm/lr": report.learning_rate,
                }
            )
        return sums.result()

    def _accumulate(self, mini: RolloutBatch, judged: Tensor) -> MetricSums:
        """Forward and backward over the micro-batches of one mini-batch, and what was seen."""
        settings, own, total = self.settings, MetricSums(), float(judged.sum())
        order = settings.micro_rows(mini, self.ranks.size)
        for rows, counts in self.ranks.share([rows for rows in order if judged[rows].any()]):
            self.check()
            micro, here = mini.select(rows), judged[rows]
            out = response_logprobs(self.model, micro, temperature=settings.temperature)
            logits = self._rewards(out.logprobs.cpu(), micro).sum(dim=1)[here]
            right = micro.column("acc")[here].to(logits)
            loss = binary_cross_entropy_with_logits(logits, right, reduction="sum") / total
            if counts:
                seen = logits.detach()
                hits = (seen > 0) == (right >= 0.5)
                own.add_scalar("loss/prm", loss.detach())
                own.add_scalar("prm/accuracy", hits.double().sum() / total)
                own.add_scalar("prm/logit", seen.double().sum() / total)
                note_suspects(own, loss, rows.tolist(), out.logprobs)
            add_gradients(loss, counts)
        return self.ranks.merge(own)
