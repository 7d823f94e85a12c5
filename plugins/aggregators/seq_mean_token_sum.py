"""Mean over sequences of each sequence's token sum."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.core.contracts import Aggregator, AggregatorConfig, Counts
from posttrain.core.math.masking import mask_weights


class SeqMeanTokenSum(Aggregator[AggregatorConfig]):
    """loss = (1 / N_seq) sum_i sum_t m_it l_it: the policy gradient of whole responses.

    A response's weight is n_i / N_seq. Source: REINFORCE over sequences, arXiv:2402.14740.
    """

    name = "seq-mean-token-sum"
    Config = AggregatorConfig

    def weights(self, mask: Tensor, counts: Counts) -> Tensor:
        """1 / N_seq for each valid token; all 0 when N_seq is 0."""
        if counts.num_seqs == 0:
            return torch.zeros_like(mask_weights(mask))
        return mask_weights(mask) / counts.num_seqs
