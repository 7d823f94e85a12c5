"""The objective: every term of a policy loss, from log-probs to one scalar per micro-batch.

It knows nothing of models. The order on a policy term is fixed: token loss, off-policy mask,
entropy mask, rollout weight, aggregator; KL and entropy terms take neither mask nor weight. All
counts come from the global mini-batch, so micro-batches' shares add up exactly.

Axes: B rows, T response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.config.coefficients import CoefSchedule, coef_at
from posttrain.core.contracts import (
    Aggregator,
    Counts,
    DistillationLoss,
    EntropyController,
    KlEstimator,
    PolicyLoss,
    Prepared,
    RolloutCorrection,
    TokenLoss,
)
from posttrain.core.contracts.base import StatefulPlugin
from posttrain.core.math.correction import bounded_exp, known_tokens
from posttrain.core.math.masking import masked
from posttrain.core.math.teacher_gap import taught

POSITIVE_PULL, NEGATIVE_PULL = "contrib/pos", "contrib/neg"


TermCounts = tuple[Counts, ...]
"""Counts of a term: of all its tokens, or of those of each teacher."""


@dataclass(frozen=True, slots=True)
class Term:
    """A loss of the sum, with its factor and its own aggregator and counts.

    With `rest_of` the factor is multiplied by 1 - that coefficient, which is another term's. With
    `num_teachers` the responses of each of that many teachers are averaged by themselves, and the
    teachers count alike.
    """

    loss: PolicyLoss[Any] | DistillationLoss[Any]
    aggregator: Aggregator[Any]
    coef: float | CoefSchedule = 1.0
    rest_of: CoefSchedule | None = None
    num_teachers: int = 0

    def coef_at(self, step: int) -> float:
        """The factor for the rollout batch `step`."""
        rest = 1.0 if self.rest_of is None else 1 - self.rest_of.at(step)
        return coef_at(self.coef, step) * rest

    def moving_coef(self, step: int) -> dict[str, float]:
        """The metric of a factor that changes from step to step; empty for one that does not."""
        if isinstance(self.coef, CoefSchedule) or self.rest_of is not None:
            return {f"loss/coef/{self.loss.name}": self.coef_at(step)}
        return {}

    def count(self, mask: Tensor, mini: RolloutBatch, num_parts: int) -> TermCounts:
        """Counts of the tokens `mask` [B, T] of a whole mini-batch: one, or one per teacher."""
        counts = (self.aggregator.count(each, mini.group_id) for each in self._masks(mask, mini))
        return tuple(replace(each, num_parts=num_parts) for each in counts)

    def share(
        self, result: TokenLoss, mask: Tensor, counts: TermCounts, micro: RolloutBatch, step: int
    ) -> Tensor:
        """This micro-batch's share of the term, with its factor; `mask` [B, T] is what counts."""
        total = result.loss.new_zeros(())
        for part, own in zip(self._masks(mask, micro), counts, strict=True):
            kept = result if part is mask else replace(result, mask=masked(result.mask, part))
            total = total + self.aggregator.aggregate(kept, part, own, micro.group_id)
        return self.coef_at(step) / len(counts) * total

    def _masks(self, mask: Tensor, batch: RolloutBatch) -> list[Tensor]:
        """`mask`, or with `num_teachers` what of it each of them judges."""
        if not self.num_teachers:
            return [mask]
        judge = batch.column("teacher_id")[:, None]
        return [masked(mask, judge == place) for place in range(self.num_teachers)]


@dataclass(frozen=True, slots=True)
class LossTerm(Term):
    """A policy loss in the sum."""

    loss: PolicyLoss[Any]


@dataclass(frozen=True, slots=True)
class DistillationTerm(Term):
    """A divergence from a teacher in the sum."""

    loss: DistillationLoss[Any]


@dataclass(frozen=True, slots=True)
class Distilled:
    """A divergence `loss` [B, T] with gradient, where it is `scored` [B, T], and its metrics."""

    loss: Tensor
    scored: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)

    def seen(self, *metrics: str) -> list[Tensor]:
        """The loss and metrics [B, T], detached; NaN where there is nothing."""
        nothing = torch.full_like(self.loss, float("nan")).detach()
        columns = [self.loss.detach(), *(self.metrics.get(name, nothing) for name in metrics)]
        return [torch.where(self.scored, column, nothing) for column in columns]


@dataclass(frozen=True, slots=True)
class PreparedMini:
    """What was taken from a whole mini-batch before its first micro-batch.

    `terms` and `term_counts` follow the objective's terms; `counts` are those of the KL term,
    `entropy_counts` of the entropy term, `observed_counts` of the term on observations,
    `distillation_counts` of the divergence from a teacher. `columns` are batch columns of the
    mini-batch's rows. `step` is the rollout batch, of which coefficients may depend.
    """

    terms: tuple[Prepared | None, ...]
    term_counts: tuple[TermCounts, ...]
    counts: Counts
    entropy_counts: Counts
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    observed_counts: TermCounts = ()
    distillation_counts: TermCounts = ()
    step: int = 0

    def rows(self, index: Tensor) -> PreparedMini:
        """The same for the rows of a micro-batch."""
        return replace(
            self,
            terms=tuple(term and term.rows(index) for term in self.terms),
            term_counts=tuple(_rows(counts, index) for counts in self.term_counts),
            counts=self.counts.rows(index),
            entropy_counts=self.entropy_counts.rows(index),
            columns={name: column[index] for name, column in self.columns.items()},
            observed_counts=_rows(self.observed_counts, index),
            distillation_counts=_rows(self.distillation_counts, index),
        )


def _rows(counts: TermCounts, index: Tensor) -> TermCounts:
    return tuple(each.rows(index) for each in counts)


@dataclass(frozen=True, slots=True)
class MicroLoss:
    """A micro-batch's share of the loss: `total` with gradient, and detached for the record.

    `parts` are shares of each term; `tokens` are [B, T] or [B] values with the mask of that shape
    over which they are averaged. `pulls` are sums of |d policy terms / d logprobs| over the tokens
    whose advantage is above 0 (`POSITIVE_PULL`) and below 0 (`NEGATIVE_PULL`). `logprobs` [B, T],
    with gradient, are those that it was computed from.
    """

    total: Tensor
    parts: Mapping[str, Tensor]
    tokens: Mapping[str, tuple[Tensor, Tensor]]
    ratio: Tensor | None = None
    pulls: Mapping[str, Tensor] = field(default_factory=dict)
    logprobs: Tensor | None = None


@dataclass
class _Sum:
    """The loss as its terms are added; `parts` and `tokens` as in `MicroLoss`."""

    total: Tensor
    parts: dict[str, Tensor] = field(default_factory=dict)
    tokens: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def add(self, name: str, value: Tensor) -> None:
        self.total = self.total + value
        self.parts[name] = value.detach()


@dataclass(frozen=True, slots=True)
class Objective:
    """The plugins that make a policy's loss.

    `aggregator` is of the KL term and, unless `entropy_aggregator` is set, of the entropy bonus.
    With `bypass_old` the engine's log-probs stand for the old policy's, and a loss without an
    importance ratio is weighed against the engine instead. `renormalise` counts only tokens that
    the rollout correction keeps. `top_entropy` below 1 trains on that share of tokens, those of the
    highest entropy (arXiv:2506.01939). `observed` is a term on the tokens that others wrote, and
    `distillation` one on those of rows with a teacher; they take neither mask nor weight.
    `entropy_controller` takes the place of `entropy_coef`. With `taught_advantages` all advantages
    are what teachers say, so that a term which reads them does not count rows without a teacher.
    """

    terms: tuple[LossTerm, ...]
    aggregator: Aggregator[Any]
    kl: KlEstimator[Any] | None = None
    entropy_coef: float = 0.0
    entropy_aggregator: Aggregator[Any] | None = None
    correction: RolloutCorrection[Any] | None = None
    bypass_old: bool = False
    renormalise: bool = False
    top_entropy: float = 1.0
    observed: LossTerm | None = None
    distillation: DistillationTerm | None = None
    entropy_controller: EntropyController[Any] | None = None
    taught_advantages: bool = False

    @property
    def has_bonus(self) -> bool:
        """Whether there is an entropy bonus in some optimizer step."""
        return self.entropy_coef > 0 or self.entropy_controller is not None

    @property
    def bonus_coef(self) -> float:
        """The coefficient of the entropy bonus in the next optimizer step."""
        controller = self.entropy_controller
        return self.entropy_coef if controller is None else controller.coefficient()

    def stateful(self) -> dict[str, StatefulPlugin[Any]]:
        """Every plugin that may keep numbers from step to step, by its name in checkpoints."""
        found: dict[str, StatefulPlugin[Any]] = {
            f"policy_loss/{term.loss.name}": term.loss for term in self.terms
        }
        if self.entropy_controller is not None:
            found["entropy_controller"] = self.entropy_controller
        return found

    def reads_observed(self, batch: RolloutBatch) -> bool:
        """Whether a term needs the log-probs of tokens that others wrote, of which it has some."""
        return self.observed is not None and batch.obs_mask is not None

    @property
    def owns_update(self) -> bool:
        """Whether a loss takes its own steps, in place of the optimizer's."""
        return any(term.loss.owns_update for term in self.terms)

    def needs_prepare(self) -> bool:
        """Whether the policy's log-probs on a whole mini-batch are needed before its update."""
        bypassed = self.bypass_old and self.correction is not None
        return (
            bypassed
            or (self.correction is not None and self.correction.reads_mini)
            or self.top_entropy < 1
            or any(term.loss.needs_prepare() for term in self.terms)
        )

    def idle_rows(self, mini: RolloutBatch, kl_coef: float) -> Tensor:
        """Rows [B] that give no gradient, because their advantages are 0 and nothing else counts.

        Who asks for the whole mini-batch first, as a covariance does, has no such rows, and neither
        has an aggregator that divides by each micro-batch's own counts: idle rows are counted.
        """
        others = self.has_bonus or (self.kl is not None and kl_coef > 0)
        others = others or any(t.aggregator.config.counts == "micro" for t in self.terms)
        others = others or self.reads_observed(mini) or self.distillation is not None
        if others or self.needs_prepare() or not all(t.loss.idle_at_zero for t in self.terms):
            return torch.zeros(len(mini), dtype=torch.bool)
        return (masked(mini.column("advantages"), mini.mask) == 0).all(dim=1)

    def required_columns(self) -> frozenset[str]:
        """Columns that the losses read."""
        losses = [term.loss.required_columns() for term in self.terms]
        if self.distillation is not None:
            losses.append(self.distillation.loss.required_columns())
        return frozenset().union(*losses)

    def correct(self, batch: RolloutBatch) -> tuple[RolloutBatch, dict[str, float]]:
        """A rollout batch with `is_weight` and `correction_mask` of its rollout correction.

        With `bypass_old` it is the mini-batch that is corrected, by `prepare`.
        """
        if self.correction is None or self.bypass_old:
            return batch, {}
        columns, metrics = self._correction(batch.column("old_logprobs"), batch)
        return batch.with_columns(**columns), metrics

    def _correction(
        self, logprobs: Tensor, batch: RolloutBatch
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        assert self.correction is not None
        found = self.correction.correct(logprobs, batch.rollout_logprobs, batch.mask)
        columns = {"is_weight": found.weight, "correction_mask": found.keep}
        return {k: v for k, v in columns.items() if v is not None}, dict(found.metrics)

    @torch.no_grad()
    def prepare(
        self,
        mini: RolloutBatch,
        generator: torch.Generator,
        num_parts: int = 1,
        step: int = 0,
    ) -> PreparedMini:
        """Counts of the global mini-batch, and what its losses need to see all of it for.

        `mini` has `logprobs_now` and `entropy` when `needs_prepare`. `num_parts` is the number of
        its micro-batches, `step` the number of the rollout batch.
        """
        columns: dict[str, Tensor] = {}
        metrics: dict[str, float] = {}
        if self.correction is not None and self.bypass_old:
            columns, metrics = self._correction(mini.column("logprobs_now"), mini)
        if self.correction is not None and self.correction.reads_mini:
            found = self.correction.correct_mini(mini)
            before = columns.get("correction_mask", mini.correction_mask)
            if found.keep is not None:
                kept = found.keep if before is None else masked(found.keep, before)
                columns["correction_mask"] = kept
            metrics |= found.metrics
        if self.top_entropy < 1:
            columns["entropy_keep"] = entropy_mask(
                mini.column("entropy"), mini.mask, self.top_entropy
            )
        if columns:
            mini = mini.with_columns(**columns)
        terms, term_counts = [], []
        for term in self.terms:
            ready = term.loss.prepare(mini, generator) if term.loss.needs_prepare() else None
            metrics |= ready.metrics if ready else {}
            terms.append(ready)
            counted = self._counted(term.loss.loss_mask(mini), term.loss, mini)
            term_counts.append(term.count(counted, mini, num_parts))
        observed_counts: TermCounts = ()
        distillation_counts: TermCounts = ()
        if (others := self.observed) is not None and mini.obs_mask is not None:
            observed_counts = others.count(mini.obs_mask, mini, num_parts)
        if (distils := self.distillation) is not None:
            distillation_counts = distils.count(distils.loss.counted(mini), mini, num_parts)
        for other in (*self.terms, self.observed, self.distillation):
            metrics |= {} if other is None else other.moving_coef(step)
        entropy_aggregator = self.entropy_aggregator or self.aggregator

        def parts(counts: Counts) -> Counts:
            return replace(counts, num_parts=num_parts)

        return PreparedMini(
            tuple(terms),
            tuple(term_counts),
            parts(self.aggregator.count(mini.mask, mini.group_id)),
            parts(entropy_aggregator.count(mini.mask, mini.group_id)),
            columns,
            metrics,
            observed_counts,
            distillation_counts,
            step,
        )

    def _counted(self, mask: Tensor, loss: PolicyLoss[Any], batch: RolloutBatch) -> Tensor:
        """The mask that a policy term's counts and lengths are taken from."""
        if self.taught_advantages and "advantages" in loss.required_columns():
            mask = masked(mask, taught(batch))
        if self.renormalise and batch.correction_mask is not None:
            return masked(mask, batch.correction_mask)
        return mask

    def loss(
        self,
        logprobs: Tensor,
        entropy: Tensor,
        micro: RolloutBatch,
        prepared: PreparedMini,
        kl_coef: float = 0.0,
        exact_kl: Tensor | None = None,
        observed: Tensor | None = None,
        distilled: Distilled | None = None,
    ) -> MicroLoss:
        """This micro-batch's share of the loss, from `logprobs` and `entropy` [B, T].

        `prepared` is cut to the rows of `micro`. `exact_kl` [B, T] stands in for an estimate when
        the KL plugin works on logits. `observed` [B, T] are log-probs at temperature 1 of the
        tokens that others wrote, where `reads_observed` says that they are needed; `distilled` is
        the divergence from the teacher, where there is a term of it.
        """
        if prepared.columns:
            micro = micro.with_columns(**prepared.columns)
        # Keeps the graph where nothing takes loss.
        made = _Sum(0.0 * masked(logprobs, micro.mask).sum())
        ratio = self._add_terms(made, logprobs, micro, prepared)
        pulls = policy_pulls(made.total, logprobs, micro)
        if self.kl is not None and kl_coef > 0:
            kl = self._kl(logprobs, micro, ratio) if exact_kl is None else exact_kl
            mean = self.aggregator.aggregate(
                TokenLoss(kl, micro.mask), micro.mask, prepared.counts, micro.group_id
            )
            made.add("loss/kl", kl_coef * mean)
            made.tokens["kl/ref"] = (kl.detach(), micro.mask)
        if (coef := self.bonus_coef) > 0:
            bonus = (self.entropy_aggregator or self.aggregator).aggregate(
                TokenLoss(entropy, micro.mask), micro.mask, prepared.entropy_counts, micro.group_id
            )
            made.add("loss/entropy", -coef * bonus)
        if (term := self.observed) is not None and observed is not None:
            others = replace(micro, mask=micro.column("obs_mask"))  # their mask and counts
            result = term.loss.token_loss(observed, others)
            made.add(
                f"loss/term/{term.loss.name}",
                term.share(result, others.mask, prepared.observed_counts, micro, prepared.step),
            )
            made.tokens["observed/nll"] = (-observed.detach(), others.mask)
        if self.distillation is not None and distilled is not None:
            mask = self.distillation.loss.counted(micro)
            where = masked(mask, distilled.scored)
            result = TokenLoss(distilled.loss.to(logprobs), where)
            counts = prepared.distillation_counts
            value = self.distillation.share(result, mask, counts, micro, prepared.step)
            made.add("loss/distillation", value)
            made.tokens |= {name: (column, where) for name, column in distilled.metrics.items()}
        shown = None if ratio is None else ratio.detach()
        return MicroLoss(made.total, made.parts, made.tokens, shown, pulls, logprobs)

    def _add_terms(
        self, made: _Sum, logprobs: Tensor, micro: RolloutBatch, prepared: PreparedMini
    ) -> Tensor | None:
        """Add the policy's terms to `made`; returns the ratio [B, T] of the first that has one."""
        ratio = None
        for term, found, counts in zip(
            self.terms, prepared.terms, prepared.term_counts, strict=True
        ):
            weighable = self._weighable(micro, term.loss)
            result = term.loss.token_loss(logprobs, weighable, found)
            ratio = result.ratio if ratio is None else ratio
            kept = self._masked(result, term.loss, logprobs, weighable)
            counted = self._counted(term.loss.loss_mask(micro), term.loss, micro)
            name = f"loss/term/{term.loss.name}" if made.parts else "loss/policy"
            made.add(name, term.share(kept, counted, counts, micro, prepared.step))
            where = self._counted(result.mask, term.loss, micro)
            made.tokens |= {
                n: (v.detach(), where if v.dim() == 2 else where.bool().any(dim=1))
                for n, v in result.metrics.items()
            }
        return ratio

    def _masked(
        self, result: TokenLoss, loss: PolicyLoss[Any], logprobs: Tensor, micro: RolloutBatch
    ) -> TokenLoss:
        """Off-policy mask, entropy mask and the weight of `micro` on a token loss."""
        mask = result.mask
        if self.correction is not None:
            keeps = self.correction.keeps(logprobs.detach(), micro)
            for keep in (keeps, micro.correction_mask):
                mask = mask if keep is None else masked(mask, keep)
        if micro.entropy_keep is not None and not loss.folds_entropy_mask:
            mask = masked(mask, micro.entropy_keep)
        weight = micro.is_weight
        if weight is None or loss.folds_weights:
            return replace(result, mask=mask)
        return replace(result, mask=mask, loss=result.loss * weight)

    def _weighable(self, micro: RolloutBatch, loss: PolicyLoss[Any]) -> RolloutBatch:
        """`micro`, without rollout weights where `loss` must not be given any.

        With `bypass_old` the importance ratio is against the engine already: a weight would count
        the difference twice.
        """
        if self.correction is None or (self.bypass_old and loss.uses_ratio):
            return replace(micro, is_weight=None)
        return micro

    def _kl(self, logprobs: Tensor, micro: RolloutBatch, ratio: Tensor | None) -> Tensor:
        """The estimate [B, T] of the KL to the reference, with the importance ratio it asks for.

        `ratio` is that of the policy loss.
        """
        assert self.kl is not None
        source, chosen = self.kl.ratio_source(), None
        if source == "policy":
            chosen = ratio
        elif source is not None:
            old = micro.column("old_logprobs") if source == "old" else micro.rollout_logprobs
            known = known_tokens(old, micro.mask)  # an engine may give none: a ratio of 1 there
            chosen = bounded_exp(masked(logprobs, known) - masked(old, known))
        reference = masked(micro.column("ref_logprobs"), micro.mask)
        return self.kl.kl(masked(logprobs, micro.mask), reference, chosen)


def policy_pulls(policy: Tensor, logprobs: Tensor, micro: RolloutBatch) -> dict[str, Tensor]:
    """Sums of |d policy / d logprobs| over the tokens with an advantage above and below 0.

    `policy` is the sum of the policy terms after aggregation, so a token counts with the weight
    that its aggregator, its masks, its clip and its rollout correction give it. Empty without a
    gradient or without advantages.
    """
    if micro.advantages is None or not policy.requires_grad:
        return {}
    (slope,) = torch.autograd.grad(policy, logprobs, retain_graph=True)
    size, advantages = slope.abs().double(), masked(micro.advantages, micro.mask)
    sides = {POSITIVE_PULL: advantages > 0, NEGATIVE_PULL: advantages < 0}
    return {name: masked(size, side).sum() for name, side in sides.items()}


def positive_share(metrics: dict[str, float]) -> dict[str, float]:
    """`metrics` with `contrib/pos_share` in place of the two sums of `MicroLoss.pulls`."""
    positive, negative = (metrics.pop(name, 0.0) for name in (POSITIVE_PULL, NEGATIVE_PULL))
    if positive + negative > 0:
        metrics["contrib/pos_share"] = positive / (positive + negative)
    return metrics


def entropy_mask(entropy: Tensor, mask: Tensor, share: float) -> Tensor:
    """1 at the masked tokens [B, T] whose entropy reaches the (1 - `share`) quantile over them.

    The quantile interpolates linearly. Source: arXiv:2506.01939, section 4.
    """
    valid = entropy[mask.bool()]
    if valid.numel() == 0:
        return torch.zeros_like(mask)
    threshold = torch.quantile(valid.double(), 1 - share)
    return ((masked(entropy, mask).double() >= threshold) & mask.bool()).to(mask.dtype)
