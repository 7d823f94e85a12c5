"""Advantage estimators that lean on a critic's values. Axes: B sequences, T response tokens."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts.advantages import AdvantageConfig, Advantages, TokenAdvantage
from posttrain.core.math.returns import ValuedSteps


class ValueConfig(AdvantageConfig):
    """Settings of every estimator that reads values."""

    gamma: float = Field(
        default=1.0, ge=0, le=1, description="discount per token (NeMo examples: 0.99 to 1)"
    )
    bootstrap_truncated: bool = Field(
        default=False,
        description="a response cut by the length limit goes on: the critic's value after its last "
        "token stands for what is missing (AReaL); false: every response ends where it ends",
    )


ValueConfigT = TypeVar("ValueConfigT", bound=ValueConfig)


class ValueAdvantage(TokenAdvantage[ValueConfigT]):
    """Estimators of rewards and values; their `returns` are what the critic is trained on."""

    needs: ClassVar[frozenset[str]] = frozenset({"token_rewards", "scored", "values"})

    def required_columns(self) -> frozenset[str]:
        """`needs`, and the value after the last token if truncated responses go on."""
        needs = super().required_columns()
        return needs | {"bootstrap_value"} if self.config.bootstrap_truncated else needs

    @abstractmethod
    def advantages_and_targets(self, steps: ValuedSteps) -> tuple[Tensor, Tensor]:
        """Advantages and the critic's targets, both [B, T] in float64, neither whitened."""

    def token_advantages(self, batch: RolloutBatch) -> Advantages:
        """Over all sampled tokens, those of rows without loss included."""
        bootstrap = torch.zeros(len(batch), dtype=torch.float64)
        if self.config.bootstrap_truncated:
            after = batch.column("bootstrap_value").double()
            bootstrap = torch.where(batch.truncated.bool(), after, bootstrap)
        steps = ValuedSteps(
            rewards=batch.column("token_rewards"),
            values=batch.column("values"),
            mask=batch.response_mask,
            bootstrap=bootstrap,
        )
        advantages, targets = self.advantages_and_targets(steps)
        return Advantages(advantages, returns=targets)
