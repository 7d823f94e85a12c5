"""The columns that the policy and its reference fill, each of them here and nowhere else.

`old_logprobs` and `entropy`, `ref_logprobs`, the rollout correction (`is_weight`,
`correction_mask`), `sum_pi_squared`, and the mismatch between engine and trainer. Advantage
estimators and the update say which of them they read; the learner only requires them.

With top-k or top-p the engine's log-probs are renormalised over the tokens that were kept, the
trainer's are not. `with_old_logprobs` is the one place where that is corrected.
Axes: B rows, T response tokens.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import torch

from posttrain.core.batch import RolloutBatch
from posttrain.core.math.mismatch import mismatch_metrics
from posttrain.core.models.sampled_products import SampledProducts
from posttrain.core.training.forward import ResponseForward
from posttrain.core.training.objective import Objective
from posttrain.core.training.updates import (
    Check,
    PolicyLearner,
    UpdateResult,
    UpdateSettings,
    no_check,
)

AUDITED_ROWS = 2
"""Neighbours, which mostly share a prompt: each pass reads all weights as it is."""


def with_old_logprobs(batch: RolloutBatch, policy: ResponseForward) -> RolloutBatch:
    """`batch` with `old_logprobs` [B, T] from a pass of the policy that sampled it.

    After truncated sampling the engine's log-probs become those of the untruncated distribution,
    as the trainer's are: rollout_logprobs + log_kept, with log_kept the log of the probability that
    top-k and top-p kept. Whatever reads both then compares like with like.
    """
    columns = {"old_logprobs": policy.logprobs.cpu()}
    if policy.log_kept is not None and batch.log_kept is None:
        kept = policy.log_kept.to(batch.rollout_logprobs)
        columns |= {"rollout_logprobs": batch.rollout_logprobs + kept, "log_kept": kept}
    return batch.with_columns(**columns)


def mismatch_of(batch: RolloutBatch, mask: torch.Tensor) -> dict[str, float]:
    """`mismatch/*` and `ess/*`: engine against `old_logprobs`, under the distribution sampled from.

    Tokens outside `mask` [B, T] are left out.
    """
    trainer, engine = batch.column("old_logprobs"), batch.rollout_logprobs
    if batch.log_kept is not None:
        trainer, engine = trainer - batch.log_kept, engine - batch.log_kept
    return mismatch_metrics(trainer, engine, mask)


def update_columns(objective: Objective, settings: UpdateSettings, kl_coef: float) -> Set[str]:
    """What an update needs of this module.

    `old_logprobs` only where the policy moves before they are read for the last time, or where
    something reads them before the update's own forward pass: a single update takes them from that.
    """
    names = set()
    if (
        settings.updates_per_batch > 1
        or objective.correction is not None
        or objective.bypass_old
        or objective.needs_prepare()
        or objective.owns_update
    ):
        names.add("old_logprobs")
    if objective.correction is not None and not objective.bypass_old:
        names.add("is_weight")
    if objective.kl is not None and kl_coef > 0 and not objective.kl.from_logits:
        names.add("ref_logprobs")
    return names


@dataclass(frozen=True, slots=True)
class ColumnFiller:
    """Fills columns with forward passes of `learner`, and measures the mismatch on the way."""

    learner: PolicyLearner

    def fill(
        self,
        batch: RolloutBatch,
        names: Set[str],
        check: Check = no_check,
        products: SampledProducts | None = None,
    ) -> tuple[RolloutBatch, dict[str, float]]:
        """`batch` with those of `names` that belong here and are not filled yet, and metrics.

        The policy must not have been updated since it sampled. `check` raises to stop.
        """
        learner, metrics = self.learner, dict[str, float]()
        if names & {"old_logprobs", "is_weight"} and batch.old_logprobs is None:
            if learner.objective.bypass_old:
                batch = batch.with_columns(old_logprobs=batch.rollout_logprobs)
            else:
                policy = learner.policy_pass(batch, check, products)
                batch = with_old_logprobs(batch, policy).with_columns(entropy=policy.entropy)
        if "ref_logprobs" in names and batch.ref_logprobs is None:
            batch = batch.with_columns(ref_logprobs=learner.reference_logprobs(batch, check))
        if "is_weight" in names and batch.is_weight is None and batch.correction_mask is None:
            batch, metrics = learner.objective.correct(batch)
        if "sum_pi_squared" in names and batch.sum_pi_squared is None:
            batch = batch.with_columns(sum_pi_squared=learner.sum_pi_squared(batch, check))
        return batch, metrics

    def fill_for_update(
        self,
        batch: RolloutBatch,
        step: int,
        kl_coef: float,
        check: Check = no_check,
        products: SampledProducts | None = None,
    ) -> tuple[RolloutBatch, dict[str, float]]:
        """`batch` ready for the update of `step`, and metrics with the mismatch where it is known.

        With `products` the update reuses what the engine computed, so that its own log-probs cannot
        show a mismatch: a few rows are computed again, other ones in each step.
        """
        metrics = {} if products is None else self._audit(batch, step, check)
        learner = self.learner
        names = update_columns(learner.objective, learner.settings, kl_coef)
        batch, found = self.fill(batch, names, check, products)
        metrics |= found
        if products is None and not self._update_shows_mismatch(batch, kl_coef):
            read = self._has_policy_logprobs(batch) and self._any_row_is_read(batch, kl_coef)
            metrics |= self.mismatch(batch, batch.mask if read else batch.response_mask, check)
        return batch, metrics

    def after_update(
        self,
        batch: RolloutBatch,
        kl_coef: float,
        result: UpdateResult,
        products: SampledProducts | None = None,
    ) -> dict[str, float]:
        """The mismatch, where it is that of log-probs which only the update computed."""
        if products is not None or not self._update_shows_mismatch(batch, kl_coef):
            return {}
        assert result.first_pass is not None, "some row was read"
        rows, policy = result.first_pass
        seen = with_old_logprobs(batch.select(rows), policy)
        return mismatch_of(seen, seen.mask)

    def mismatch(
        self, batch: RolloutBatch, mask: torch.Tensor, check: Check = no_check
    ) -> dict[str, float]:
        """Engine against the present policy, from `old_logprobs` or else from a pass of its own.

        Tokens outside `mask` [B, T] are left out.
        """
        if not self._has_policy_logprobs(batch):
            batch = with_old_logprobs(batch, self.learner.policy_pass(batch, check))
        return mismatch_of(batch, mask)

    def _audit(self, batch: RolloutBatch, step: int, check: Check) -> dict[str, float]:
        """The mismatch of a few rows, computed by the trainer alone."""
        count = min(AUDITED_ROWS, len(batch))
        few = batch.select((torch.arange(count) + step * count) % len(batch))
        few = with_old_logprobs(few, self.learner.policy_pass(few, check))
        return mismatch_of(few, few.response_mask)

    def _update_shows_mismatch(self, batch: RolloutBatch, kl_coef: float) -> bool:
        """Whether the update's first pass has log-probs of the sampling policy, and nothing else.

        With `bypass_old` the first mini-batch alone is read by the policy that sampled it; a trust
        region has moved the policy by then.
        """
        objective = self.learner.objective
        if self._has_policy_logprobs(batch) or (objective.bypass_old and objective.owns_update):
            return False
        return self._any_row_is_read(batch, kl_coef)

    def _has_policy_logprobs(self, batch: RolloutBatch) -> bool:
        return batch.old_logprobs is not None and not self.learner.objective.bypass_old

    def _any_row_is_read(self, batch: RolloutBatch, kl_coef: float) -> bool:
        idle = self.learner.settings.idle_rows(self.learner.objective, batch, kl_coef)
        return bool((batch.mask.any(dim=1) & ~idle).any())
