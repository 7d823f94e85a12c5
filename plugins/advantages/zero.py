"""No advantage of its own: for stages that learn from a teacher alone."""

from __future__ import annotations

import torch

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import AdvantageEstimator, Advantages, NoConfig


class ZeroAdvantage(AdvantageEstimator[NoConfig]):
    """A_t = 0 on every token [B, T]; rewards are not read, and a stage needs none.

    What is learned comes from `advantage_transform` or from `distillation`.
    Source: on-policy distillation without rewards, arXiv:2306.13649.
    """

    name = "zero"
    Config = NoConfig
    needs = frozenset()

    def reads_token_rewards(self) -> bool:
        return False

    def estimate(self, batch: RolloutBatch) -> Advantages:
        """Zeros [B, T]."""
        return Advantages(torch.zeros_like(batch.rollout_logprobs))
