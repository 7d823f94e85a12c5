"""PPO's rule for its KL penalty: halve or double the coefficient (arXiv:1707.06347, section 4)."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from posttrain.core.contracts import MovingController, StartConfig
from posttrain.core.math.kl import halving_factor


class PpoHalvingConfig(StartConfig):
    """Settings of `ppo_halving`."""

    coef: float = Field(
        default=1.0, gt=0, le=1_000_000, description="coefficient before the first update"
    )
    target: float = Field(
        default=0.01, gt=0, description="KL to hold, nats per token (paper: 0.003, 0.01, 0.03)"
    )
    factor: float = Field(default=2.0, gt=1, description="what coef is multiplied or divided by")
    band: float = Field(default=1.5, gt=1, description="no change within target / band .. * band")
    min_coef: float = Field(
        default=0.0, ge=0, description="floor; above 0 it keeps the way back up short (paper: none)"
    )
    max_coef: float | None = Field(default=None, gt=0, description="ceiling; null = none (paper)")


class PpoHalvingController(MovingController[PpoHalvingConfig]):
    """coef / factor when KL < target / band, coef * factor when KL > target * band, else coef.

    KL is the token mean of a rollout batch. A KL that is not finite (nothing was measured) changes
    nothing. Source: PPO, arXiv:1707.06347, section 4.
    """

    name = "ppo_halving"
    Config = PpoHalvingConfig

    def target(self) -> tuple[Literal["token", "sequence"], float]:
        """`target`, per token."""
        return "token", self.config.target

    def update(self, kl_per_token: float, kl_per_sequence: float, num_rows: int) -> None:
        """Halve, double or keep."""
        config = self.config
        if not math.isfinite(kl_per_token):
            return
        moved = self.coef * halving_factor(kl_per_token, config.target, config.factor, config.band)
        ceiling = math.inf if config.max_coef is None else config.max_coef
        self.coef = min(max(moved, config.min_coef), ceiling)
