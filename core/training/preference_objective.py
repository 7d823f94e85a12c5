"""The objective of preference learning: from token log-probs to one scalar per micro-batch.

It knows nothing of models. Every term is divided by counts of the global mini-batch, so
micro-batches' shares add up exactly.

Axes: B pairs or labelled rows, T completion tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from posttrain.core.contracts import LabelLoss, PairLoss, PreferenceLoss, Prepared
from posttrain.core.training.metrics import MetricSums
from posttrain.core.training.preference_scores import (
    ImpliedReward,
    LabelTokens,
    MiniCounts,
    PairTokens,
    RowMetrics,
    Scoring,
    Tokens,
    label_metrics,
    pair_metrics,
)


@dataclass(frozen=True, slots=True)
class PreferenceTerm:
    loss: PreferenceLoss[Any]
    coef: float = 1.0


@dataclass(frozen=True, slots=True)
class PreparedTerms:
    """What each term took from the whole mini-batch before its first micro-batch."""

    terms: tuple[Prepared | None, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)

    def rows(self, index: Tensor) -> PreparedTerms:
        return replace(self, terms=tuple(term and term.rows(index) for term in self.terms))


@dataclass(frozen=True, slots=True)
class PreferenceMicro:
    """A micro-batch's share of the loss.

    `total` carries the gradient, as do `losses` [B], what each row adds before the division.
    `parts` are the terms' shares of `total`, by the name of the loss, when there are several.
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
                return ImpliedReward(scale, term.loss.per_token_reward)
        return ImpliedReward(self.reward_scale, per_token=False)

    def nothing_prepared(self) -> PreparedTerms:
        return PreparedTerms((None,) * len(self.terms))

    @torch.no_grad()
    def prepare(self, tokens: Tokens) -> PreparedTerms:
        """What the losses need of the whole mini-batch, from all its `tokens`."""
        counts = MiniCounts.of(tokens)
        found: list[Prepared | None] = []
        for term in self.terms:
            loss = term.loss
            if not (loss.needs_prepare or loss.needs_kl_completions):
                found.append(None)
            elif isinstance(loss, PairLoss) and isinstance(tokens, PairTokens):
                found.append(loss.prepare(self.scoring.pairs(tokens, counts)))
            elif isinstance(loss, LabelLoss) and isinstance(tokens, LabelTokens):
                found.append(loss.prepare(self.scoring.labelled(tokens, counts)))
        metrics = {name: value for term in found if term for name, value in term.metrics.items()}
        return PreparedTerms(tuple(found), metrics)

    def loss(self, tokens: Tokens, counts: MiniCounts, prepared: PreparedTerms) -> PreferenceMicro:
        """This micro-batch's share of the mini-batch's loss; `prepared` is cut to its rows."""
        if isinstance(tokens, PairTokens):
            weighed, rows = self._of_pairs(tokens, counts, prepared)
        else:
            weighed, rows = self._of_labels(tokens, counts, prepared)
        losses = torch.stack(list(weighed)).sum(dim=0)
        shares = zip(self.terms, weighed, strict=True)
        parts = {term.loss.name: part.detach().sum() / counts.num_rows for term, part in shares}
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
