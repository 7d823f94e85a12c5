"""AdamW, the optimizer of a config that names none."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from posttrain.core.config.sections import AdamWConfig, OptimizerSection
from posttrain.core.contracts import Optimizer
from posttrain.core.training.compact_adamw import CompactAdamW, why_missing


class AdamW(Optimizer[AdamWConfig]):
    """w <- w - lr (m / (sqrt(v) + eps) + weight_decay w), with m and v the bias-corrected moving
    averages of the gradient and its square.

    Source: arXiv:1711.05101. Moments of 8 bits: arXiv:2110.02861; stochastic rounding of bfloat16
    weights: arXiv:2010.06192.
    """

    name, Config = "adamw", AdamWConfig
    on_ranks = True

    @classmethod
    def of(cls, section: OptimizerSection) -> AdamW:
        """With the settings of a section."""
        return cls(AdamWConfig.model_validate(section.fields()))

    def build(
        self, weights: Sequence[Tensor], learning_rate: float, seed: int
    ) -> torch.optim.Optimizer:
        config = self.config
        if config.rounding == "stochastic" or config.moments == "8bit":
            section = OptimizerSection(learning_rate=learning_rate, **config.model_dump())
            return CompactAdamW(weights, section, seed)
        return torch.optim.AdamW(
            list(weights),
            lr=learning_rate,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def keeps_masters(self) -> bool:
        return self.config.rounding == "masters"

    def state_bytes(self) -> float:
        return 8.0 if self.config.moments == "float32" else 2.0

    def missing(self) -> str:
        return (why_missing() or "") if self.config.moments == "8bit" else ""
