"""No advantage of its own: for stages that learn from a teacher alone."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import AdvantageConfig, RowAdvantage


class ZeroAdvantage(RowAdvantage[AdvantageConfig]):
    """A_t = 0 on every token [B, T]; rewards are not read, and a stage needs none.

    What is learned comes from `advantage_transform` or from `distillation`.
    Source: on-policy distillation without rewards, arXiv:2306.13649.
    """

    name = "zero"
    Config = AdvantageConfig
    is_zero: ClassVar[bool] = True

    def reads_token_rewards(self) -> bool:
        return False

    def row_advantages(self, batch: RolloutBatch) -> tuple[Tensor, dict[str, float]]:
        """Zeros [B]."""
        return torch.zeros(len(batch), dtype=torch.float64), {}
