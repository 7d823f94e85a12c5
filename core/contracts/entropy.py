"""What decides the coefficient of the entropy bonus."""

from __future__ import annotations

from abc import abstractmethod

from posttrain.core.contracts.base import ConfigT, StatefulPlugin


class EntropyController(StatefulPlugin[ConfigT]):
    """Decides the coefficient of the entropy bonus; its `state` is checkpointed."""

    kind = "entropy_controller"

    @abstractmethod
    def coefficient(self) -> float:
        """The coefficient in the next optimizer step, at least 0."""

    @abstractmethod
    def update(self, entropy: float) -> None:
        """Receives, after each optimizer step, the entropy (nats) of the policy that the step was
        taken from: its mean over the tokens of the mini-batch."""
