"""Aggregation: from a loss per token to one scalar.

An aggregator is the only place that divides, and only by counts of the global mini-batch. Axes: B
sequences, T response tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from posttrain.core.contracts.base import Plugin, PluginConfig
from posttrain.core.contracts.policy import TokenLoss


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
