"""A KL controller: the coefficient grows while KL is above its target, and shrinks below it."""

from __future__ import annotations

from pydantic import Field

from posttrain.core.contracts import MovingController, StartConfig


class ExampleConfig(StartConfig):
    """Settings of `example`."""

    coef: float = Field(default=0.1, gt=0, le=100, description="the coefficient at the start")
    target: float = Field(default=0.05, gt=0, le=100, description="KL per token, nats")
    step: float = Field(default=0.1, gt=0, lt=1, description="change in one step, as a fraction")


class Example(MovingController[ExampleConfig]):
    """coef' = coef * (1 + step) where KL > target, else coef * (1 - step). Source: an example.

    The base class keeps `coef` in checkpoints.
    """

    name = "example"
    Config = ExampleConfig

    def update(self, kl_per_token: float, kl_per_sequence: float, num_rows: int) -> None:
        """Take the KL (nats) of a rollout batch."""
        sign = 1 if kl_per_token > self.config.target else -1
        self.coef *= 1 + sign * self.config.step
