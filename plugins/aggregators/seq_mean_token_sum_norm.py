"""Token sums over a fixed length, mean over sequences (Dr. GRPO, arXiv:2503.20783)."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from posttrain.core.contracts import Aggregator, AggregatorConfig, Counts
from posttrain.core.math.masking import mask_weights


class SeqMeanTokenSumNormConfig(AggregatorConfig):
    """Settings of `seq-mean-token-sum-norm`."""

    norm_length: int | None = Field(
        default=None, ge=1, description="L, tokens; null = the stage's max_response_length"
    )
    verl_compat: bool = Field(
        default=False,
        description="divide by L alone, not by N_seq, so that the loss grows with the mini-batch "
        "(verl before 0.9.1)",
    )


class SeqMeanTokenSumNorm(Aggregator[SeqMeanTokenSumNormConfig]):
    """loss = (1 / (N_seq * L)) sum_it m_it l_it with a constant L, so no response is diluted.

    L is never the padded width, which changes between micro-batches.
    Source: Dr. GRPO, arXiv:2503.20783, section 3.2.
    """

    name = "seq-mean-token-sum-norm"
    Config = SeqMeanTokenSumNormConfig

    def weights(self, mask: Tensor, counts: Counts) -> Tensor:
        """1 / (N_seq * L) for each valid token; all 0 when N_seq is 0."""
        length = self.config.norm_length
        if length is None:
            raise ValueError(
                "seq-mean-token-sum-norm divides by a fixed length: set norm_length, in tokens; a "
                "stage fills in its max_response_length when it is null"
            )
        if counts.num_seqs == 0:
            return torch.zeros_like(mask_weights(mask))
        rows = 1.0 if self.config.verl_compat else counts.num_seqs
        return mask_weights(mask) / (rows * length)
