"""Mean over all tokens of the mini-batch (DAPO, arXiv:2503.14476, eq. 8)."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.core.contracts import Aggregator, AggregatorConfig, Counts
from posttrain.core.math.masking import mask_weights


class TokenMean(Aggregator[AggregatorConfig]):
    """loss = (1 / N_tok) sum_it m_it l_it: every token of the mini-batch weighs the same.

    A response's weight is its share of the tokens. Source: DAPO, arXiv:2503.14476, section 3.3.
    """

    name = "token-mean"
    Config = AggregatorConfig

    def weights(self, mask: Tensor, counts: Counts) -> Tensor:
        """1 / N_tok for each valid token; all 0 when N_tok is 0."""
        if counts.num_tokens == 0:
            return torch.zeros_like(mask_weights(mask))
        return mask_weights(mask) / counts.num_tokens
