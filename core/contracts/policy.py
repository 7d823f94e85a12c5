"""Policy losses, their aggregation, and what is added to them: KL terms and rollout corrections.

A policy loss gives a number per token and never reduces; an aggregator is the only place that
divides, and only by counts of the global mini-batch. Axes: B sequences, T response tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, TypeVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts.base import ConfigT, Plugin, PluginConfig


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
        """The same for the rows of a micro-batch."""
        return replace(self, columns={name: col[index] for name, col in self.columns.items()})


SEQUENCE_AGGREGATORS = frozenset({"seq-mean-token-mean"})
"""Where a loss with one value per response is the published one: each response counts once."""


class RatioConfig(PluginConfig):
    """Settings of every loss with an importance ratio."""

    ratio_clamp: float | None = Field(
        default=20.0, gt=0, description="bound of |log ratio|, nats; no gradient beyond; null = off"
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


class PolicyLoss(Plugin[ConfigT]):
    """The policy term of the loss, token by token. It never reduces: the aggregator divides."""

    kind = "policy_loss"
    needs: ClassVar[frozenset[str]] = frozenset({"advantages", "old_logprobs"})
    source: ClassVar[Literal["rollout", "ptx"]] = "rollout"
    """`ptx`: the term reads the stage's pre-training batches instead of the rollout."""
    uses_ratio: ClassVar[bool] = True
    """Whether an importance ratio corrects for stale samples. If not, a bypassed rollout correction
    weighs the loss itself."""
    folds_weights: ClassVar[bool] = False
    """The loss reads `is_weight` itself, so it is not multiplied by it."""
    folds_entropy_mask: ClassVar[bool] = False
    """The loss applies `entropy_keep` itself, inside a mean over tokens."""
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
        """Told the metrics of the last update on a rollout batch, with `kl/phase_k3` among them:
        the token mean of k3 from the rollout's policy to the updated one."""

    def wants_phase_kl(self) -> bool:
        """Whether `on_phase_end` needs `kl/phase_k3`; costs a forward pass per rollout batch."""
        return False

    def state(self) -> dict[str, float]:
        """What a checkpoint must keep."""
        return {}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Continue from a checkpoint's `state`."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What aggregators divide by, counted once over the *global* mini-batch from `mask`.

    `num_tokens` is N_tok; `num_seqs` is N_seq, the rows with at least one token; `num_groups` the
    prompts with at least one; `group_tokens` [B] the tokens of each row's group. `num_ranks` undoes
    the mean over data-parallel ranks, `num_parts` is how many micro-batches there are.
    """

    num_tokens: float
    num_seqs: float
    num_groups: float = 0.0
    group_tokens: Tensor | None = None
    num_ranks: int = 1
    num_parts: int = 1

    @classmethod
    def of(cls, mask: Tensor, group_id: Tensor | None = None) -> Counts:
        """Counts of a whole mini-batch with `mask` [B, T] and groups [B]."""
        row_tokens = mask.double().sum(dim=1)
        tokens, seqs = float(row_tokens.sum()), float((row_tokens > 0).sum())
        if group_id is None:
            return cls(tokens, seqs)
        _, index = torch.unique(group_id, return_inverse=True)
        per_group = torch.zeros(int(index.max()) + 1, dtype=torch.float64)
        per_group.index_add_(0, index, row_tokens)
        return cls(tokens, seqs, float((per_group > 0).sum()), per_group[index])

    def rows(self, index: Tensor) -> Counts:
        """The same counts for the rows of a micro-batch."""
        if self.group_tokens is None:
            return self
        return replace(self, group_tokens=self.group_tokens[index])


class AggregatorConfig(PluginConfig):
    """Settings of every aggregator. The defaults are exact; the others reproduce peers."""

    counts: Literal["global", "micro"] = Field(
        default="global",
        description="micro: divide by each micro-batch's own counts (TRL's bnpo); the result then "
        "depends on micro_batch_size, so allow_local must say yes",
    )
    allow_local: bool = Field(default=False, description="permit counts: micro")
    count_empty_seqs: bool = Field(
        default=False, description="N_seq counts rows without tokens as well (TRL)"
    )
    num_tokens: float | None = Field(
        default=None, gt=0, description="N_tok given instead of counted"
    )
    num_seqs: float | None = Field(default=None, gt=0, description="N_seq given instead of counted")

    @model_validator(mode="after")
    def _local_counts_are_meant(self) -> AggregatorConfig:
        if self.counts == "micro" and not self.allow_local:
            raise ValueError(
                "counts: micro makes the result depend on micro_batch_size; say allow_local: true "
                "to have that, or counts: global"
            )
        return self


AggregatorConfigT = TypeVar("AggregatorConfigT", bound=AggregatorConfig)


class Aggregator(Plugin[AggregatorConfigT]):
    """[B, T] token losses to one scalar: the only place that divides, and only by global counts."""

    kind = "aggregator"

    @abstractmethod
    def weights(self, mask: Tensor, counts: Counts) -> Tensor:
        """Weight [B, T] of each token, from the rows' full `mask` [B, T] and global `counts`."""

    def count(self, mask: Tensor, group_id: Tensor | None = None) -> Counts:
        """The counts of a global mini-batch under this aggregator's config."""
        counts, config = Counts.of(mask, group_id), self.config
        if config.count_empty_seqs:
            counts = replace(counts, num_seqs=float(mask.shape[0]))
        if config.num_tokens is not None:
            counts = replace(counts, num_tokens=config.num_tokens)
        if config.num_seqs is not None:
            counts = replace(counts, num_seqs=config.num_seqs)
        return counts

    def aggregate(
        self,
        token_loss: TokenLoss,
        mask: Tensor,
        counts: Counts,
        group_id: Tensor | None = None,
    ) -> Tensor:
        """Weighted sum of the token losses; micro-batches' results add up to the global value.

        `mask` [B, T] is the batch's mask: it makes the counts. `token_loss.mask` only zeroes terms.
        Where it is 0 the loss may hold anything, NaN included. `group_id` [B] is read by `counts:
        micro` alone.
        """
        parts = 1
        if self.config.counts == "micro":
            parts, ranks = counts.num_parts, counts.num_ranks
            counts = replace(self.count(mask, group_id), num_ranks=ranks)
        weighted = token_loss.loss * self.weights(mask, counts)
        kept = torch.where(token_loss.mask.bool(), weighted, torch.zeros_like(weighted))
        return kept.sum() * (counts.num_ranks / parts)


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

    @abstractmethod
    def correct(self, logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Correction:
        """From the trainer's and the engine's log-probs [B, T] of the same tokens, once per batch.

        What lies under `mask` [B, T] is ignored, NaN included.
        """

    def keeps(self, logprobs: Tensor, micro: RolloutBatch) -> Tensor | None:
        """Tokens [B, T] to keep under the *current* log-probs, per micro-batch; None = all."""
        return None
