"""Losses on preferences: pairs of answers (chosen, rejected), or single answers with a label.

Axes: B pairs or labelled rows of one micro-batch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from posttrain.core.contracts.base import ConfigT, Plugin, PluginConfig
from posttrain.core.contracts.policy import Prepared
from posttrain.core.errors import RunError
from posttrain.core.math.preference import alpha_shape


@dataclass(frozen=True, slots=True)
class PairScores:
    """What a loss may read of B pairs; every tensor is [B].

    `chosen` and `rejected` are the scores u and v that most losses compare: a reward model's
    rewards, or the policy's sequence log-prob less the reference's, after the f-divergence.
    `chosen_logps` and `rejected_logps` are the policy's own sums of token log-probs (nats, weighed
    by `ld_alpha` as the scores are), `ref_*` the reference's (0 when there is none);
    `chosen_tokens` and `rejected_tokens` their completion lengths; `chosen_nll` is minus the plain
    sum. A reward model has none of these. `margin` is the pair's own (0 = none). `num_pairs` and
    `num_chosen_tokens` count the *global* mini-batch: the trainer divides a loss by `num_pairs`.
    """

    chosen: Tensor
    rejected: Tensor
    margin: Tensor
    chosen_logps: Tensor | None = None
    rejected_logps: Tensor | None = None
    ref_chosen_logps: Tensor | None = None
    ref_rejected_logps: Tensor | None = None
    chosen_tokens: Tensor | None = None
    rejected_tokens: Tensor | None = None
    chosen_nll: Tensor | None = None
    num_pairs: float = 1.0
    num_chosen_tokens: float = 1.0

    @classmethod
    def of_rewards(
        cls, chosen: Tensor, rejected: Tensor, margin: Tensor | None = None
    ) -> PairScores:
        zero = torch.zeros_like(chosen) if margin is None else margin
        return cls(chosen, rejected, zero, num_pairs=float(chosen.shape[0]))

    def logps(self) -> tuple[Tensor, Tensor]:
        return _given(self.chosen_logps), _given(self.rejected_logps)

    def ref_logps(self) -> tuple[Tensor, Tensor]:
        return _given(self.ref_chosen_logps), _given(self.ref_rejected_logps)

    def per_token(self, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor]:
        lengths = _given(self.chosen_tokens), _given(self.rejected_tokens)
        return chosen / lengths[0].clamp(min=1), rejected / lengths[1].clamp(min=1)

    def alpha_scores(self, alpha: float) -> tuple[Tensor, Tensor]:
        """AlphaPO's scores: the shaped mean log-prob per token, less the reference's."""
        own, ref = self.per_token(*self.logps()), self.per_token(*self.ref_logps())
        chosen, rejected = (
            alpha_shape(mean, alpha) - alpha_shape(anchor, alpha)
            for mean, anchor in zip(own, ref, strict=True)
        )
        return chosen, rejected

    def token_mean_nll(self) -> Tensor:
        """[B], whose mean over all pairs is the mean over all chosen tokens of the mini-batch."""
        return _given(self.chosen_nll) * (self.num_pairs / max(1.0, self.num_chosen_tokens))


def _given(column: Tensor | None) -> Tensor:
    if column is None:
        raise RunError(
            "this preference loss reads log-probs, but a reward model has only rewards: use a loss "
            "that trains a reward model, such as bradley_terry"
        )
    return column


@dataclass(frozen=True, slots=True)
class LabelledScores:
    """What a loss may read of B single answers; every tensor is [B].

    `scores` are u, the policy's sequence log-prob less the reference's; `desirable` is boolean.
    `kl_scores` are the same log-ratio of a *mismatched* answer: an answer to another prompt of the
    mini-batch (None when the loss does not read it). `num_rows` counts the *global* mini-batch.
    """

    scores: Tensor
    desirable: Tensor
    kl_scores: Tensor | None = None
    tokens: Tensor | None = None
    num_rows: float = 1.0


class AlphaPoConfig(PluginConfig):
    """Settings of the losses whose scores AlphaPO may shape (arXiv:2501.03884)."""

    alpha_po: float = Field(
        default=0.0,
        ge=-10,
        le=10,
        description="AlphaPO's shape: a score is (1 - p^-alpha) / alpha of the answer's mean "
        "probability per token p, in place of its log-prob; 0 = off",
    )


class PreferenceLoss(Plugin[ConfigT]):
    """Base of the losses on preferences: derive from `PairLoss` or `LabelLoss`."""

    kind = "preference_loss"
    data: ClassVar[Literal["pairs", "labels"]]
    trains: ClassVar[frozenset[str]] = frozenset({"policy"})
    """What the loss can train: `policy`, `reward_model`, or both."""
    needs_reference: ClassVar[bool] = True
    """Whether the scores are relative to a reference policy."""
    reads_scores: ClassVar[bool] = True
    """Whether it compares scores; a loss of bare log-probs does not notice the f-divergence."""
    needs_prepare: ClassVar[bool] = False
    """Whether `prepare` must see the whole mini-batch first; costs a forward pass."""
    needs_kl_completions: ClassVar[bool] = False
    """Whether mismatched answers must be scored for `prepare` (KTO's reference point)."""
    per_token_reward: ClassVar[bool] = False
    """Whether the reward it implies is of the mean log-prob per token, not the sum."""

    def reward_scale(self) -> float | None:
        """Factor of a log-ratio in the reward it implies (beta); None = none. For metrics alone."""
        return None

    def reward_alpha(self) -> float:
        """AlphaPO's shape of the reward it implies; 0 = a plain log-ratio. For metrics alone."""
        return self.config.alpha_po if isinstance(self.config, AlphaPoConfig) else 0.0


class PairLoss(PreferenceLoss[ConfigT]):
    """A loss of (chosen, rejected) pairs."""

    data = "pairs"

    def prepare(self, mini: PairScores) -> Prepared:
        """From the detached scores of the whole mini-batch; columns are [B], in its row order."""
        return Prepared()

    @abstractmethod
    def pair_loss(self, pairs: PairScores, prepared: Prepared | None = None) -> Tensor:
        """Loss [B] of each pair; the trainer takes the mean over the global mini-batch.

        Without `prepared`, `pairs` are the whole mini-batch.
        """

    def metrics(self, pairs: PairScores) -> Mapping[str, Tensor]:
        """Values [B] of this loss's own; the trainer averages each over the mini-batch."""
        return {}


class BetaConfig(PluginConfig):
    """Settings of every loss with an inverse temperature."""

    beta: float = Field(
        default=0.1,
        gt=0,
        le=1_000,
        description="factor of the log-ratio to the reference in the implied reward: smaller lets "
        "the policy move further (DPO paper, TRL: 0.1)",
    )


BetaConfigT = TypeVar("BetaConfigT", bound=BetaConfig)


class BetaPairLoss(PairLoss[BetaConfigT]):
    """A loss of pairs whose implied reward is beta times a log-ratio."""

    def reward_scale(self) -> float | None:
        return self.config.beta


class LabelLoss(PreferenceLoss[ConfigT]):
    """A loss of single answers labelled desirable or not."""

    data = "labels"

    def prepare(self, mini: LabelledScores) -> Prepared:
        """From the detached scores of the whole mini-batch; columns are [B], in its row order.

        A loss with `needs_kl_completions` but without `needs_prepare` is given NaN for `scores`,
        which spares a forward pass.
        """
        return Prepared()

    @abstractmethod
    def label_loss(self, rows: LabelledScores, prepared: Prepared | None = None) -> Tensor:
        """Loss [B] of each row; the trainer takes the mean over the global mini-batch.

        Without `prepared`, `rows` are the whole mini-batch.
        """
