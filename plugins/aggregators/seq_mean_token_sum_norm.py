"""Token sums over a fixed length, mean over sequences (Dr. GRPO, arXiv:2503.20783)."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from posttrain.core.contracts import Aggregator, Counts, PluginConfig
from posttrain.core.hooks import hookimpl
from posttrain.core.math.masking import mask_weights


class SeqMeanTokenSumNormConfig(PluginConfig):
    """Settings of `seq-mean-token-sum-norm`."""

    norm_length: int = Field(
        ge=1, description="L, tokens; the paper's choice is generation.max_response_length"
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
        if counts.num_seqs == 0:
            return torch.zeros_like(mask_weights(mask))
        return mask_weights(mask) / (counts.num_seqs * self.config.norm_length)


@hookimpl
def posttrain_register() -> list[type[SeqMeanTokenSumNorm]]:
    """Offer this plugin."""
    return [SeqMeanTokenSumNorm]
