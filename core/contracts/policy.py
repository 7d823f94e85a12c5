"""Policy losses, and the rollout corrections that weigh and mask them.

A policy loss gives a number per token and never reduces. Axes: B sequences, T response tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts.base import ConfigT, Plugin, PluginConfig, StatefulPlugin


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """`loss` [B, T] (unreduced, to be minimised) and `mask` [B, T], a subset of the batch's mask.

    `ratio` [B, T], with gradient, is the loss's own importance ratio before any clip. `metrics` are
    [B, T] tensors, which the learner averages over the mask of the global mini-batch, or [B], which
    it averages over the rows with a token in that mask.
    """

    loss: Tensor
    mask: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    ratio: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a loss took from the whole mini-batch before its first micro-batch.

    `scalars` hold for all rows. `columns`, [B] or [B, T], travel with their rows. `metrics` are of
    the whole mini-batch.
    """

    scalars: Mapping[str, float] = field(default_factory=dict)
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    def rows(self, index: Tensor) -> Prepared:
        return replace(self, columns={name: col[index] for name, col in self.columns.items()})


SEQUENCE_AGGREGATORS = frozenset({"seq-mean-token-mean"})
"""Where a loss with one value per response is the published one: each response counts once."""


class RatioConfig(PluginConfig):
    """Settings of every loss with an importance ratio."""

    ratio_clamp: float | None = Field(
        default=20.0,
        gt=0,
        le=80,
        description="bound of |log ratio|, nats; no gradient beyond; null = off",
    )


class SequenceRatioConfig(RatioConfig):
    """Settings of the losses that may have one ratio per response."""

    adv_reduce: Literal["none", "mean"] = Field(
        default="none",
        description="none: a response with more than one advantage is an error; mean: it gets the "
        "mean of its tokens' (verl, AReaL). Only where a response has one ratio",
    )
    allow_any_agg: bool = Field(
        default=False,
        description="permit aggregators other than seq-mean-token-mean where a response has one "
        "ratio (LUSPO: seq-mean-token-sum)",
    )


class PolicyLoss(StatefulPlugin[ConfigT]):
    """The policy term of the loss, token by token. It never reduces: the aggregator divides."""

    kind = "policy_loss"
    needs: ClassVar[frozenset[str]] = frozenset({"advantages", "old_logprobs"})
    source: ClassVar[Literal["rollout", "ptx", "observations"]] = "rollout"
    """What the term reads: the sampled tokens of the rollout; `ptx`: the stage's pre-training
    batches; `observations`: the rollout's tokens that others wrote, which are its `mask` then, with
    log-probs at temperature 1."""
    uses_ratio: ClassVar[bool] = True
    """Whether an importance ratio corrects for stale samples. If not, a bypassed rollout correction
    weighs the loss itself."""
    folds_weights: ClassVar[bool] = False
    """The loss reads `is_weight` itself, so it is not multiplied by it."""
    folds_entropy_mask: ClassVar[bool] = False
    """The loss applies `entropy_keep` itself, inside a mean over tokens."""
    idle_at_zero: ClassVar[bool] = False
    """Tokens of advantage 0 have no gradient and no part in anyone else's, so that rows of them may
    be left out of the forward and backward passes. Contract tests hold a loss to it."""
    stops_gradients: ClassVar[bool] = False
    """Its gradient is not that of its value: a factor is held constant on purpose (CISPO)."""
    owns_update: ClassVar[bool] = False
    """The loss takes its own optimizer step (a trust region) instead of AdamW's."""

    def required_columns(self) -> frozenset[str]:
        """Columns of the batch that `token_loss` reads; `needs`, and more if the config asks."""
        return self.needs

    def allowed_aggregators(self) -> frozenset[str] | None:
        """Aggregators under which this is the published loss; None = any."""
        return None

    def loss_mask(self, batch: RolloutBatch) -> Tensor:
        """The tokens [B, T] that make this term's counts: all that take loss, unless overridden."""
        return batch.mask

    def needs_prepare(self) -> bool:
        """Whether `prepare` must see the whole mini-batch first; costs a forward pass."""
        return False

    def prepare(self, mini: RolloutBatch, generator: torch.Generator) -> Prepared:
        """Statistics and selections over the global mini-batch, without gradient.

        `mini` has `logprobs_now` and `entropy` of the policy at the start of this optimizer step.
        """
        return Prepared()

    @abstractmethod
    def token_loss(
        self, logprobs: Tensor, micro: RolloutBatch, prepared: Prepared | None = None
    ) -> TokenLoss:
        """Loss of `logprobs` [B, T] (float32, with gradient) on the rows of `micro`.

        `prepared` is what `prepare` returned, cut to these rows; None when it was not asked for.
        """

    def on_phase_end(self, stats: Mapping[str, float]) -> None:
        """Receives the metrics of the last update on a rollout batch, with `kl/phase_k3` among
        them: the token mean of k3 from the rollout's policy to the updated one."""

    def wants_phase_kl(self) -> bool:
        """Whether `on_phase_end` needs `kl/phase_k3`; costs a forward pass per rollout batch."""
        return False


class AnchoredConfig(RatioConfig):
    """Settings of the losses whose ratio may be against either of two policies."""

    anchor: Literal["old", "rollout"] = Field(
        default="old",
        description="whose log-probs the ratio is against: the trainer's of before the update, or "
        "the engine's (then use no rollout weight)",
    )


AnchoredConfigT = TypeVar("AnchoredConfigT", bound=AnchoredConfig)


class AnchoredLoss(PolicyLoss[AnchoredConfigT]):
    """A policy loss whose ratio is against the policy that `anchor` names."""

    def required_columns(self) -> frozenset[str]:
        return frozenset({"advantages", f"{self.config.anchor}_logprobs"})

    def anchor_logprobs(self, micro: RolloutBatch) -> Tensor:
        by_engine = self.config.anchor == "rollout"
        return micro.rollout_logprobs if by_engine else micro.column("old_logprobs")


@dataclass(frozen=True, slots=True)
class Correction:
    """`weight` [B, T] on the policy loss (None = 1) and `keep` [B, T] (None = all tokens).

    Both are detached. `metrics` are of the whole batch it was made from.
    """

    weight: Tensor | None = None
    keep: Tensor | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class RolloutCorrection(Plugin[ConfigT]):
    """Weights and rejections for samples whose engine disagrees with the trainer's policy."""

    kind = "rollout_correction"
    needs: ClassVar[frozenset[str]] = frozenset({"old_logprobs", "rollout_logprobs"})
    reads_mini: ClassVar[bool] = False
    """Whether `correct_mini` must see each whole mini-batch first; costs a forward pass."""

    @abstractmethod
    def correct(self, logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Correction:
        """From the trainer's and the engine's log-probs [B, T] of the same tokens, once per batch.

        What lies under `mask` [B, T] is ignored, NaN included.
        """

    def correct_mini(self, mini: RolloutBatch) -> Correction:
        """Tokens to keep of a whole mini-batch, in addition to those of `correct`.

        `mini` has `logprobs_now` and `entropy` of the policy at the start of this optimizer step. A
        weight is not taken from here.
        """
        return Correction()

    def keeps(self, logprobs: Tensor, micro: RolloutBatch) -> Tensor | None:
        """Tokens [B, T] to keep under the *current* log-probs, per micro-batch; None = all."""
        return None
