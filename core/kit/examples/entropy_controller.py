"""An entropy controller: a bonus in proportion to what is missing to a target."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from posttrain.core.contracts import EntropyController, PluginConfig


class ExampleConfig(PluginConfig):
    """Settings of `example`."""

    target: float = Field(default=0.3, gt=0, le=100, description="entropy per token, nats")
    factor: float = Field(default=0.01, gt=0, le=100, description="coefficient per missing nat")


class Example(EntropyController[ExampleConfig]):
    """coef = factor * max(0, target - H), H the entropy of the step before. Source: an example."""

    name = "example"
    Config = ExampleConfig

    def __init__(self, config: ExampleConfig) -> None:
        super().__init__(config)
        self.coef = 0.0

    def coefficient(self) -> float:
        """0 in the first step."""
        return self.coef

    def update(self, entropy: float) -> None:
        """Take the entropy (nats) of an optimizer step."""
        self.coef = self.config.factor * max(0.0, self.config.target - entropy)

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"coef": self.coef}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Continue from `state`."""
        self.coef = state["coef"]
