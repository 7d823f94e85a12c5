"""From token log-probs to the scores that preference losses compare, and to their metrics.

Axes: B pairs or labelled rows, T completion tokens. Sums over tokens are float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.core.contracts import LabelledScores, PairScores
from posttrain.core.math.masking import row_sums
from posttrain.core.math.preference import (
    FDivergence,
    desensitised_weights,
    divergence_score,
    masked_sums,
    policy_weight,
)

RowMetrics = Mapping[str, tuple[Tensor, Tensor]]
"""Metrics by name: values [B] to be averaged over the mask [B] beside them."""


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
    """The reward that a preference loss implies: `scale` times an answer's log-ratio."""

    scale: float
    per_token: bool

    def of(self, pairs: PairScores) -> tuple[Tensor, Tensor]:
        """Rewards [B] of chosen and rejected; without a reference the log-prob is the ratio."""
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
