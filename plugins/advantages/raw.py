"""The reward itself as advantage, without any baseline."""

from __future__ import annotations

from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import AdvantageConfig, RowAdvantage
from posttrain.core.math import groups
from posttrain.core.math.masking import masked


class RawAdvantage(RowAdvantage[AdvantageConfig]):
    """A_i = R_i, the same on every token of response i.

    R_i is the sum of `token_rewards` [B, T] over the response. Unbiased, and of the highest
    variance of all. Source: NeMo-RL's `raw`; Williams, Machine Learning 8 (1992), baseline 0.
    """

    name = "raw"
    Config = AdvantageConfig

    def row_advantages(self, batch: RolloutBatch) -> tuple[Tensor, dict[str, float]]:
        """Rewards [B] of the scored rows."""
        return masked(groups.outcome_rewards(batch), batch.column("scored")), {}
