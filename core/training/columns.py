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
from posttrain.core.contracts import TEACHER_COLUMNS
from posttrain.core.math.correction import mismatch_metrics
from posttrain.core.models.sampled_outputs import SampledOutputs
from posttrain.core.training.forward import ResponseForward
from posttrain.core.training.objective import Objective
from posttrain.core.training.teachers import Teachers
from posttrain.core.training.updates import (
    PolicyLearner,
    UpdateResult,
    UpdateSettings,
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
    names = set(objective.required_columns() & {"ref_logprobs"})
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
    return names | (objective.required_columns() & TEACHER_COLUMNS)


@dataclass(frozen=True, slots=True)
class ReadyBatch:
    """A batch with every column that an update reads, and what was measured of it.

    With `mismatch_pending` the log-probs of the policy that sampled are first computed by the
    update: then its result shows the mismatch.
    """

    batch: RolloutBatch
    metrics: dict[str, float]
    mismatch_pending: bool = False

    def pending_mismatch(self, result: UpdateResult) -> dict[str, float]:
        """The mismatch in the rows that the first optimizer step read; empty if measured before."""
        if not self.mismatch_pending:
            return {}
        assert result.first_pass is not None, "some row was read"
        rows, policy = result.first_pass
        seen = with_old_logprobs(self.batch.select(rows), policy)
        return mismatch_of(seen, seen.mask)


@dataclass(frozen=True, slots=True)
class ColumnFiller:
    """Fills columns with forward passes of `learner` and what the `teachers` of the stage say, and
    measures the mismatch on the way.
    """

    learner: PolicyLearner
    teachers: Teachers | None = None

    def fill(
        self,
        batch: RolloutBatch,
        names: Set[str],
        products: SampledOutputs | None = None,
    ) -> tuple[RolloutBatch, dict[str, float]]:
        """`batch` with those of `names` that belong here and are not filled yet, and metrics.

        The policy must not have been updated since it sampled.
        """
        learner, metrics = self.learner, dict[str, float]()
        if names & {"old_logprobs", "is_weight"} and batch.old_logprobs is None:
            if learner.objective.bypass_old:
                batch = batch.with_columns(old_logprobs=batch.rollout_logprobs)
            else:
                policy = learner.policy_pass(batch, products)
                batch = with_old_logprobs(batch, policy).with_columns(entropy=policy.entropy)
        if "ref_logprobs" in names and batch.ref_logprobs is None:
            batch = batch.with_columns(ref_logprobs=learner.reference_logprobs(batch))
        if "is_weight" in names and batch.is_weight is None and batch.correction_mask is None:
            batch, metrics = learner.objective.correct(batch)
        if "sum_pi_squared" in names and batch.sum_pi_squared is None:
            batch = batch.with_columns(sum_pi_squared=learner.sum_pi_squared(batch))
        if self.teachers is not None:
            batch, found = self.teachers.fill(batch, names, learner)
            metrics |= found
        return batch, metrics

    def fill_for_update(
        self,
        batch: RolloutBatch,
        step: int,
        kl_coef: float,
        products: SampledOutputs | None = None,
    ) -> ReadyBatch:
        """`batch` ready for the update of `step`, and metrics with the mismatch where it is known.

        With `products` the update reuses what the engine computed, so that its own log-probs cannot
        show a mismatch: a few rows are computed again, other ones in each step.
        """
        objective, settings = self.learner.objective, self.learner.settings
        metrics = {} if products is None else self._audit(batch, step)
        names = update_columns(objective, settings, kl_coef)
        batch, found = self.fill(batch, names, products)
        metrics |= found
        if products is not None:
            return ReadyBatch(batch, metrics)
        idle = settings.idle_rows(objective, batch, kl_coef)
        is_read = bool((batch.mask.any(dim=1) & ~idle).any())
        if batch.old_logprobs is not None and not objective.bypass_old:
            metrics |= mismatch_of(batch, batch.mask if is_read else batch.response_mask)
        elif is_read and not (objective.bypass_old and objective.owns_update):
            # The first optimizer step computes what is needed. A trust region moves the policy
            # before it reads a row.
            return ReadyBatch(batch, metrics, mismatch_pending=True)
        else:
            metrics |= self.mismatch(batch)
        return ReadyBatch(batch, metrics)

    def mismatch(self, batch: RolloutBatch) -> dict[str, float]:
        """Engine against the present policy on all sampled tokens, for a step without an update."""
        if batch.old_logprobs is None or self.learner.objective.bypass_old:
            batch = with_old_logprobs(batch, self.learner.policy_pass(batch))
        return mismatch_of(batch, batch.response_mask)

    def _audit(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        """The mismatch of a few rows, computed by the trainer alone."""
        count = min(AUDITED_ROWS, len(batch))
        few = batch.select((torch.arange(count) + step * count) % len(batch))
        few = with_old_logprobs(few, self.learner.policy_pass(few))
        return mismatch_of(few, few.response_mask)
