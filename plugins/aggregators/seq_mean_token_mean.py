"""Mean over sequences of each sequence's token mean (GRPO, arXiv:2402.03300, eq. 3)."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.core.contracts import Aggregator, AggregatorConfig, Counts
from posttrain.core.math.masking import mask_weights


class SeqMeanTokenMean(Aggregator[AggregatorConfig]):
    """loss = (1 / N_seq) sum_i (1 / n_i) sum_t m_it l_it, n_i the valid tokens of row i.

    Every non-empty response weighs 1 / N_seq; a token of a long one weighs less.
    Source: DeepSeekMath, arXiv:2402.03300, eq. 3.
    """

    name = "seq-mean-token-mean"
    Config = AggregatorConfig

    def weights(self, mask: Tensor, counts: Counts) -> Tensor:
        """1 / (N_seq * n_i) for each valid token; all 0 when N_seq is 0."""
        valid = mask_weights(mask)
        if counts.num_seqs == 0:
            return torch.zeros_like(valid)
        # An empty row has no token to weigh; 1 only keeps 0 / 0 away.
        lengths = valid.sum(dim=1, keepdim=True).clamp(min=1)
        return valid / lengths / counts.num_seqs
