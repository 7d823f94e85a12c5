"""Sum of all token losses: no division at all."""

from __future__ import annotations

from torch import Tensor

from posttrain.core.contracts import Aggregator, AggregatorConfig, Counts
from posttrain.core.math.masking import mask_weights


class TokenSum(Aggregator[AggregatorConfig]):
    """loss = sum_it m_it l_it, the same weight 1 for every token.

    A response's weight is its length. Source: the plain policy gradient sum (Williams 1992).
    """

    name = "token-sum"
    Config = AggregatorConfig

    def weights(self, mask: Tensor, counts: Counts) -> Tensor:
        """1 for each valid token."""
        return mask_weights(mask)
