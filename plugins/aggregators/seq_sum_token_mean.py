"""Sum over sequences of each sequence's token mean."""

from __future__ import annotations

from torch import Tensor

from posttrain.core.contracts import Aggregator, AggregatorConfig, Counts
from posttrain.core.math.masking import mask_weights


class SeqSumTokenMean(Aggregator[AggregatorConfig]):
    """loss = sum_i (1 / n_i) sum_t m_it l_it, n_i the valid tokens of row i.

    Every non-empty response weighs 1, however many there are. Formula: `seq-mean-token-mean`
    without the division by N_seq.
    """

    name = "seq-sum-token-mean"
    Config = AggregatorConfig

    def weights(self, mask: Tensor, counts: Counts) -> Tensor:
        """1 / n_i for each valid token of row i."""
        valid = mask_weights(mask)
        # An empty row has no token to weigh; 1 only keeps 0 / 0 away.
        return valid / valid.sum(dim=1, keepdim=True).clamp(min=1)
