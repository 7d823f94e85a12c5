"""An aggregator: the mean over all tokens of the mini-batch."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.core.contracts import Aggregator, AggregatorConfig, Counts
from posttrain.core.math.masking import mask_weights


class Example(Aggregator[AggregatorConfig]):
    """loss = (1 / N_tok) sum_it m_it l_it. Source: DAPO, arXiv:2503.14476, section 3.3.

    `counts` are of the whole mini-batch, so that micro-batches add up to the same loss.
    """

    name = "example"
    Config = AggregatorConfig

    def weights(self, mask: Tensor, counts: Counts) -> Tensor:
        """1 / N_tok for each token of `mask` [B, T]; all 0 when there is none."""
        weights = mask_weights(mask)
        return weights / counts.num_tokens if counts.num_tokens else torch.zeros_like(weights)
