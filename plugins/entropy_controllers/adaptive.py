"""An entropy bonus that acts only while the entropy is below a target (arXiv:2505.22312)."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pydantic import Field, model_validator

from posttrain.core.contracts import EntropyController, PluginConfig


class AdaptiveEntropyConfig(PluginConfig):
    """Settings of `adaptive`."""

    coef: float = Field(default=0.0, ge=0, le=1_000, description="coefficient at the start")
    target: float = Field(default=0.2, gt=0, le=100, description="entropy to hold, nats per token")
    delta: float = Field(default=0.005, gt=0, le=1_000, description="change after each step")
    min_coef: float = Field(default=0.0, ge=0, le=1_000, description="floor")
    max_coef: float = Field(default=1.0, ge=0, le=1_000, description="ceiling")

    @model_validator(mode="after")
    def _starts_within_its_bounds(self) -> AdaptiveEntropyConfig:
        if not self.min_coef <= self.coef <= self.max_coef:
            raise ValueError(
                f"coef {self.coef:g} must lie within min_coef {self.min_coef:g} and max_coef "
                f"{self.max_coef:g}"
            )
        return self


class AdaptiveEntropy(EntropyController[AdaptiveEntropyConfig]):
    """coef_{n+1} = coef_n + delta if H_n <= target, else coef_n - delta, within its bounds.

    H_n is the entropy of optimizer step n. Step n + 1 uses coef_{n+1} if H_n <= target and 0
    otherwise, so the first step has no bonus. An entropy that is not finite changes nothing.
    Source: Skywork-OR1, arXiv:2505.22312, section 4.
    """

    name = "adaptive"
    Config = AdaptiveEntropyConfig

    def __init__(self, config: AdaptiveEntropyConfig) -> None:
        super().__init__(config)
        self.coef, self.entropy = config.coef, math.inf

    def coefficient(self) -> float:
        """The coefficient where the last entropy was at most the target, else 0."""
        return self.coef if self.entropy <= self.config.target else 0.0

    def update(self, entropy: float) -> None:
        """Move by `delta` and keep the entropy for the next step."""
        config = self.config
        if not math.isfinite(entropy):
            return
        moved = self.coef + (config.delta if entropy <= config.target else -config.delta)
        self.coef = min(max(moved, config.min_coef), config.max_coef)
        self.entropy = entropy

    def state(self) -> dict[str, float]:
        """The coefficient, and the last entropy once there is one."""
        measured = {"entropy": self.entropy} if math.isfinite(self.entropy) else {}
        return {"coef": self.coef, **measured}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Continue from `state`."""
        self.coef, self.entropy = state["coef"], state.get("entropy", math.inf)
