"""Mean over prompts of each prompt's token mean."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.core.contracts import Aggregator, AggregatorConfig, Counts
from posttrain.core.math.masking import mask_weights


class PromptMean(Aggregator[AggregatorConfig]):
    """loss = (1 / P) sum_p (1 / n_p) sum of m_it l_it over prompt p's responses, n_p their tokens.

    Every prompt with a valid token weighs 1 / P; inside a prompt all tokens weigh the same, so its
    long responses weigh more. Formula: `token-mean` prompt by prompt, as in SkyRL.
    """

    name = "prompt-mean"
    Config = AggregatorConfig

    def weights(self, mask: Tensor, counts: Counts) -> Tensor:
        """1 / (P * n_p) for each valid token; all 0 when P is 0."""
        valid = mask_weights(mask)
        if counts.group_tokens is None and counts.num_tokens > 0:
            raise ValueError("prompt-mean needs the tokens of each prompt: count with group_id")
        if counts.group_tokens is None or counts.num_groups == 0:
            return torch.zeros_like(valid)
        # A group without a token has none to weigh; 1 only keeps 0 / 0 away.
        group_tokens = counts.group_tokens.clamp(min=1)[:, None].to(valid)
        return valid / group_tokens / counts.num_groups
