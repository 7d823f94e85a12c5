"""GDPO: each reward component is normalised in its group before they are added."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import GroupAdvantage, GroupConfig
from posttrain.core.errors import RunError
from posttrain.core.math import groups


class GdpoConfig(GroupConfig):
    """Settings of the `gdpo` advantage."""

    weights: tuple[float, ...] | None = Field(
        default=None, description="factor of each reward, in their order; null = 1 each"
    )
    component_norm: Literal["std", "centre"] = Field(
        default="std", description="of a component in its group: z-scores, or deviations from mean"
    )
    ddof: Literal[0, 1] = Field(default=1, description="1 = unbiased (n - 1), 0 = population")
    eps: float = Field(default=1e-6, ge=0, le=1, description="added to the deviation (TRL: 1e-4)")
    whiten: Literal["off", "tokens", "sequences"] = Field(
        default="sequences",
        description="shift and scale the weighted sum: over responses of the batch (NeMo, TRL), "
        "over tokens (verl), or not at all",
    )


class GdpoAdvantage(GroupAdvantage[GdpoConfig]):
    """A_i = whiten(sum_k w_k * (R_ik - mean_g R_k) / (std_g R_k + eps)), on every token.

    R_ik are `reward_components` [B, K], so no component drowns another by its scale. A missing one
    (NaN) contributes 0 and is out of its component's statistics. It reads components only, so
    rewards of single tokens are refused. Source: arXiv:2601.05242.
    """

    name = "gdpo"
    Config = GdpoConfig
    needs: ClassVar[frozenset[str]] = frozenset({"token_rewards", "scored", "reward_components"})

    def reads_token_rewards(self) -> bool:
        """Only components."""
        return False

    def row_advantages(self, batch: RolloutBatch) -> tuple[Tensor, dict[str, float]]:
        """Weighted sum [B] of the components' advantages."""
        components, scored = batch.column("reward_components").double(), self.compared(batch)
        result = torch.zeros(len(batch), dtype=torch.float64)
        for values, weight in zip(components.unbind(1), self._weights(components), strict=True):
            given = scored & values.isfinite()
            result = result + weight * self.compare(values, given, batch)
        return result, self.group_metrics(result, scored, batch)

    def _weights(self, components: Tensor) -> tuple[float, ...]:
        given, num_components = self.config.weights, components.shape[1]
        if given is None:
            return (1.0,) * num_components
        if len(given) != num_components:
            raise RunError(
                f"advantage 'gdpo' has {len(given)} weights for {num_components} rewards: give one "
                "per reward, in their order, or null"
            )
        return given

    def group_advantages(self, rewards: Tensor, rows: Tensor, batch: RolloutBatch) -> Tensor:
        """One component's scores [G] in a group where it differs."""
        if self.config.component_norm == "centre":
            return rewards - rewards.mean()
        return groups.z_scores(rewards, self.config.ddof, self.config.eps)

    def alone(self, rewards: Tensor) -> Tensor:
        """Mean 0 and deviation 1 stand for what a group of one does not have."""
        return (
            rewards if self.config.component_norm == "centre" else rewards / (1 + self.config.eps)
        )
