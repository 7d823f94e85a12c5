"""An optimizer: the sign of a moving average (Lion)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from posttrain.core.contracts import Optimizer, PluginConfig


class ExampleConfig(PluginConfig):
    """Settings of `example`; the learning rate and its schedule are the stage's own."""

    betas: tuple[float, float] = Field(
        default=(0.9, 0.99), description="averages: of the step, and of the state"
    )
    weight_decay: float = Field(default=0.0, ge=0, le=10, description="decoupled, as AdamW's")


class Example(Optimizer[ExampleConfig]):
    """w <- w - lr (sign(b1 m + (1 - b1) g) + weight_decay w), then m <- b2 m + (1 - b2) g.

    Source: Lion, arXiv:2302.06675, algorithm 2.
    """

    name = "example"
    Config = ExampleConfig
    on_ranks = True  # each weight is moved by its own gradient and state alone

    def build(
        self, weights: Sequence[Tensor], learning_rate: float, seed: int
    ) -> torch.optim.Optimizer:
        """The optimizer of `weights`."""
        return Lion(list(weights), learning_rate, self.config)

    def state_bytes(self) -> float:
        """One float32 average."""
        return 4.0


class Lion(torch.optim.Optimizer):
    """What takes the steps."""

    def __init__(self, weights: list[Tensor], lr: float, config: ExampleConfig) -> None:
        self.config = config
        super().__init__(weights, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step of each weight that has a gradient."""
        first, second = self.config.betas
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                average = state.setdefault("average", torch.zeros_like(weight))
                direction = average.lerp(weight.grad, 1 - first).sign_()
                direction.add_(weight, alpha=self.config.weight_decay)
                weight.sub_(direction, alpha=group["lr"])
                average.lerp_(weight.grad, 1 - second)
