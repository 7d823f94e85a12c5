"""The objective of preference learning: token log-probs to scores to one scalar.

It knows nothing of models. Every term is divided by counts of the global mini-batch, so
micro-batches' shares add up exactly.

Axes: B pairs or labelled rows, T completion tokens. Sums over tokens are float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from posttrain.core.config.base import distinct_names
from posttrain.core.contracts import (
    LabelledScores,
    LabelLoss,
    PairLoss,
    PairScores,
    PreferenceLoss,
    Prepared,
)
from posttrain.core.math.masking import row_sums
from posttrain.core.math.preference import (
    FDivergence,
    desensitised_weights,
    divergence_score,
    masked_sums,
    policy_weight,
)
from posttrain.core.training.metrics import MetricSums

RowMetrics = Mapping[str, tuple[Tensor, Tensor]]
"""Metrics by name: values [B] to be averaged over the mask [B] next to them."""


@dataclass(frozen=True, slots=True)
class PairTokens:
    """Token log-probs (nats) of B pairs: every tensor is [B, T] but `margin` [B].

    Only the policy's own log-probs carry gradients. `ref_*` are the reference's, None without one.
    `*_log_sum_sq` are log sum_v pi(v)^2 of the policy, for WPO alone. What lies under a mask is
    ignored.
    """

    chosen: Tensor
    rejected: Tensor
    chosen_mask: Tensor
    rejected_mask: Tensor
    ref_chosen: Tensor | None = None
    ref_rejected: Tensor | None = None
    chosen_log_sum_sq: Tensor | None = None
    rejected_log_sum_sq: Tensor | None = None
    margin: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LabelTokens:
    """Token log-probs (nats) of B single answers: every tensor is [B, T] but `desirable` [B].

    `kl_*` are of the mismatched answers, and may have another width; None when no loss reads them.
    """

    logprobs: Tensor
    mask: Tensor
    desirable: Tensor
    ref_logprobs: Tensor | None = None
    kl_logprobs: Tensor | None = None
    ref_kl_logprobs: Tensor | None = None
    kl_mask: Tensor | None = None


Tokens = PairTokens | LabelTokens


@dataclass(frozen=True, slots=True)
class MiniCounts:
    """Pairs (or labelled rows) and chosen tokens of the global mini-batch."""

    num_rows: float
    num_chosen_tokens: float = 0.0

    @classmethod
    def of(cls, tokens: Tokens) -> MiniCounts:
        """The counts when `tokens` are the whole mini-batch."""
        if isinstance(tokens, PairTokens):
            return cls(float(len(tokens.chosen)), float(tokens.chosen_mask.sum()))
        return cls(float(len(tokens.logprobs)))


@dataclass(frozen=True, slots=True)
class Scoring:
    """How the log-probs of a pair become its scores.

    `f_divergence` maps each answer's log-ratio, `alpha` is the coefficient of the alpha-divergence.
    With `ld_alpha` tokens past the shorter answer's length weigh that much. With `wpo` a pair
    weighs as much as the policy itself would say its answers.
    """

    f_divergence: FDivergence = "reverse_kl"
    alpha: float = 0.5
    ld_alpha: float | None = None
    wpo: bool = False

    def pairs(self, tokens: PairTokens, counts: MiniCounts) -> PairScores:
        """Scores of pairs; without a reference they are the policy's own log-probs."""
        masks = tokens.chosen_mask, tokens.rejected_mask
        weights: tuple[Tensor | None, Tensor | None] = None, None
        if self.ld_alpha is not None:
            weights = (
                desensitised_weights(masks[0], masks[1], self.ld_alpha),
                desensitised_weights(masks[1], masks[0], self.ld_alpha),
            )
        chosen = masked_sums(tokens.chosen, masks[0], weights[0])
        rejected = masked_sums(tokens.rejected, masks[1], weights[1])
        ref_chosen, ref_rejected = torch.zeros_like(chosen), torch.zeros_like(rejected)
        if tokens.ref_chosen is not None and tokens.ref_rejected is not None:
            ref_chosen = masked_sums(tokens.ref_chosen, masks[0], weights[0])
            ref_rejected = masked_sums(tokens.ref_rejected, masks[1], weights[1])
        margin = torch.zeros_like(ref_chosen) if tokens.margin is None else tokens.margin.double()
        return PairScores(
            chosen=divergence_score(chosen - ref_chosen, self.f_divergence, self.alpha),
            rejected=divergence_score(rejected - ref_rejected, self.f_divergence, self.alpha),
            margin=margin,
            chosen_logps=chosen,
            rejected_logps=rejected,
            ref_chosen_logps=ref_chosen,
            ref_rejected_logps=ref_rejected,
            chosen_tokens=masks[0].sum(dim=1).double(),
            rejected_tokens=masks[1].sum(dim=1).double(),
            chosen_nll=-row_sums(tokens.chosen, masks[0]),
            num_pairs=counts.num_rows,
            num_chosen_tokens=counts.num_chosen_tokens,
        )

    def labelled(self, tokens: LabelTokens, counts: MiniCounts) -> LabelledScores:
        """Scores of labelled rows; the options for pairs have no part in them."""
        kl_scores = None
        if tokens.kl_logprobs is not None and tokens.kl_mask is not None:
            kl_scores = row_sums(tokens.kl_logprobs, tokens.kl_mask)
            if tokens.ref_kl_logprobs is not None:
                kl_scores = kl_scores - row_sums(tokens.ref_kl_logprobs, tokens.kl_mask)
        scores = row_sums(tokens.logprobs, tokens.mask)
        if tokens.ref_logprobs is not None:
            scores = scores - row_sums(tokens.ref_logprobs, tokens.mask)
        return LabelledScores(
            scores,
            tokens.desirable.bool(),
            kl_scores,
            tokens.mask.sum(dim=1).double(),
            num_rows=counts.num_rows,
        )

    def weights(self, tokens: PairTokens) -> Tensor | None:
        """Weight [B] of each pair, detached; None when all are 1."""
        if not self.wpo:
            return None
        assert tokens.chosen_log_sum_sq is not None and tokens.rejected_log_sum_sq is not None
        return torch.exp(
            policy_weight(tokens.chosen, tokens.chosen_log_sum_sq, tokens.chosen_mask)
            + policy_weight(tokens.rejected, tokens.rejected_log_sum_sq, tokens.rejected_mask)
        )


@dataclass(frozen=True, slots=True)
class ImpliedReward:
    """The reward that a preference loss implies: `scale` times an answer's log-ratio.

    With `alpha` the log-ratio is that of AlphaPO's scores.
    """

    scale: float
    per_token: bool
    alpha: float = 0.0

    def of(self, pairs: PairScores) -> tuple[Tensor, Tensor]:
        """Rewards [B] of chosen and rejected; without a reference the log-prob is the ratio."""
        if self.alpha != 0:
            shaped = pairs.alpha_scores(self.alpha)
            return self.scale * shaped[0], self.scale * shaped[1]
        chosen, rejected = pairs.logps()
        ref_chosen, ref_rejected = pairs.ref_logps()
        gains = chosen - ref_chosen, rejected - ref_rejected
        if self.per_token:
            gains = pairs.per_token(*gains)
        return self.scale * gains[0], self.scale * gains[1]


@torch.no_grad()
def pair_metrics(pairs: PairScores, reward: ImpliedReward, *, has_reference: bool) -> RowMetrics:
    """Implied rewards, log-probs, and with a reference which way both moved from it."""
    chosen, rejected = pairs.logps()
    ref_chosen, ref_rejected = pairs.ref_logps()
    deltas = chosen - ref_chosen, rejected - ref_rejected
    per_token, rewards = pairs.per_token(chosen, rejected), reward.of(pairs)
    values = {
        "rewards/chosen": rewards[0],
        "rewards/rejected": rewards[1],
        "rewards/accuracy": (rewards[0] > rewards[1]).double(),
        "logps/chosen": chosen,
        "logps/rejected": rejected,
        "logps/chosen_per_token": per_token[0],
        "logps/rejected_per_token": per_token[1],
    }
    if has_reference:
        values |= {
            "logps/chosen_delta": deltas[0],
            "logps/rejected_delta": deltas[1],
            "pref/both_falling": ((deltas[0] < 0) & (deltas[1] < 0)).double(),
        }
    everywhere = torch.ones_like(chosen, dtype=torch.bool)
    return {name: (value.detach(), everywhere) for name, value in values.items()}


@torch.no_grad()
def label_metrics(tokens: LabelTokens, rows: LabelledScores, scale: float) -> RowMetrics:
    """Implied rewards and log-probs of the desirable rows (chosen) and of the others."""
    logps = row_sums(tokens.logprobs, tokens.mask)
    lengths = tokens.mask.sum(dim=1).clamp(min=1).double()
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for name, kept in (("chosen", rows.desirable), ("rejected", ~rows.desirable)):
        found[f"rewards/{name}"] = scale * rows.scores, kept
        found[f"logps/{name}"] = logps, kept
        found[f"logps/{name}_per_token"] = logps / lengths, kept
        if tokens.ref_logprobs is not None:
            found[f"logps/{name}_delta"] = rows.scores, kept
    return found


@dataclass(frozen=True, slots=True)
class PreferenceTerm:
    loss: PreferenceLoss[Any]
    coef: float = 1.0


@dataclass(frozen=True, slots=True)
class PreparedTerms:
    """What each term took from the whole mini-batch before its first micro-batch.

    `kl_scores` [B] are the log-ratios of mismatched answers, where a loss asked for them.
    """

    terms: tuple[Prepared | None, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
    kl_scores: Tensor | None = None

    def rows(self, index: Tensor) -> PreparedTerms:
        return replace(self, terms=tuple(term and term.rows(index) for term in self.terms))


@dataclass(frozen=True, slots=True)
class PreferenceMicro:
    """A micro-batch's share of the loss.

    `total` carries the gradient, as do `losses` [B], what each row adds before the division.
    `parts` are the terms' shares of `total`, by the name of the loss (`dpo`,
    `dpo_2`), when there are several.
    """

    total: Tensor
    losses: Tensor
    parts: Mapping[str, Tensor]
    rows: RowMetrics

    def record(self, sums: MetricSums) -> None:
        sums.add_scalar("loss/preference", self.total.detach())
        for name, value in self.parts.items():
            sums.add_scalar(f"loss/term/{name}", value)
        for name, (values, mask) in self.rows.items():
            sums.add(name, values, mask)


@dataclass(frozen=True, slots=True)
class PreferenceObjective:
    """A weighted sum of preference losses, all of pairs or all of labelled rows.

    `reference_free` takes the policy's own log-probs for scores. `reward_scale` is the factor of
    the logged rewards when none of the losses implies one.
    """

    terms: tuple[PreferenceTerm, ...]
    scoring: Scoring = Scoring()
    reference_free: bool = False
    reward_scale: float = 1.0

    @property
    def data(self) -> Literal["pairs", "labels"]:
        return self.terms[0].loss.data

    @property
    def needs_reference(self) -> bool:
        return not self.reference_free and any(term.loss.needs_reference for term in self.terms)

    @property
    def needs_prepare(self) -> bool:
        """Whether all scores of a mini-batch must be known before its first micro-batch."""
        return any(term.loss.needs_prepare for term in self.terms)

    @property
    def needs_kl_completions(self) -> bool:
        return any(term.loss.needs_kl_completions for term in self.terms)

    @property
    def rewards(self) -> ImpliedReward:
        """The reward that is logged: of the first loss that implies one."""
        for term in self.terms:
            scale = term.loss.reward_scale()
            if scale is not None:
                return ImpliedReward(scale, term.loss.per_token_reward, term.loss.reward_alpha())
        return ImpliedReward(self.reward_scale, per_token=False)

    def nothing_prepared(self) -> PreparedTerms:
        return PreparedTerms((None,) * len(self.terms))

    @torch.no_grad()
    def prepare(self, tokens: Tokens) -> PreparedTerms:
        """What the losses need of the whole mini-batch, from all its `tokens`."""
        counts, kl_scores = MiniCounts.of(tokens), None
        found: list[Prepared | None] = []
        for term in self.terms:
            loss = term.loss
            if not (loss.needs_prepare or loss.needs_kl_completions):
                found.append(None)
            elif isinstance(loss, PairLoss) and isinstance(tokens, PairTokens):
                found.append(loss.prepare(self.scoring.pairs(tokens, counts)))
            elif isinstance(loss, LabelLoss) and isinstance(tokens, LabelTokens):
                labelled = self.scoring.labelled(tokens, counts)
                kl_scores = labelled.kl_scores
                found.append(loss.prepare(labelled))
        metrics = {name: value for term in found if term for name, value in term.metrics.items()}
        return PreparedTerms(tuple(found), metrics, kl_scores)

    def loss(self, tokens: Tokens, counts: MiniCounts, prepared: PreparedTerms) -> PreferenceMicro:
        """This micro-batch's share of the mini-batch's loss; `prepared` is cut to its rows."""
        if isinstance(tokens, PairTokens):
            weighed, rows = self._of_pairs(tokens, counts, prepared)
        else:
            weighed, rows = self._of_labels(tokens, counts, prepared)
        losses = torch.stack(list(weighed)).sum(dim=0)
        names = distinct_names(term.loss.name for term in self.terms)
        parts = {
            name: part.detach().sum() / counts.num_rows
            for name, part in zip(names, weighed, strict=True)
        }
        total = losses.sum() / counts.num_rows
        return PreferenceMicro(total, losses, parts if len(parts) > 1 else {}, rows)

    def _of_pairs(
        self, tokens: PairTokens, counts: MiniCounts, prepared: PreparedTerms
    ) -> tuple[list[Tensor], RowMetrics]:
        """Each term's losses [B], factor and pair weight included, and the metrics."""
        pairs, weights = self.scoring.pairs(tokens, counts), self.scoring.weights(tokens)
        has_reference = tokens.ref_chosen is not None
        rows = dict(pair_metrics(pairs, self.rewards, has_reference=has_reference))
        weighed = []
        for term, found in zip(self.terms, prepared.terms, strict=True):
            assert isinstance(term.loss, PairLoss), "a config check keeps the kinds apart"
            loss = term.coef * term.loss.pair_loss(pairs, found)
            weighed.append(loss if weights is None else weights * loss)
            for name, value in term.loss.metrics(pairs).items():
                rows[name] = value.detach(), torch.ones_like(value, dtype=torch.bool)
        if weights is not None:
            rows["pref/wpo_weight"] = weights, torch.ones_like(weights, dtype=torch.bool)
        return weighed, rows

    def _of_labels(
        self, tokens: LabelTokens, counts: MiniCounts, prepared: PreparedTerms
    ) -> tuple[list[Tensor], RowMetrics]:
        labelled = self.scoring.labelled(tokens, counts)
        weighed = []
        for term, found in zip(self.terms, prepared.terms, strict=True):
            assert isinstance(term.loss, LabelLoss), "a config check keeps the kinds apart"
            weighed.append(term.coef * term.loss.label_loss(labelled, found))
        return weighed, label_metrics(tokens, labelled, self.rewards.scale)


def with_margin(metrics: dict[str, float]) -> dict[str, float]:
    """Averaged metrics, and the difference of the two mean rewards when both are there."""
    if "rewards/chosen" not in metrics or "rewards/rejected" not in metrics:
        return metrics
    return metrics | {"rewards/margin": metrics["rewards/chosen"] - metrics["rewards/rejected"]}
