"""KL to the reference policy, and what decides coefficients: its own, and the entropy bonus's.

Axes: B sequences, T response tokens, N tokens, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Literal, TypeVar

from torch import Tensor

from posttrain.core.contracts.base import ConfigT, Plugin, PluginConfig, StatefulPlugin
from posttrain.core.errors import RunError


class KlEstimator(Plugin[ConfigT]):
    """Per-token estimate of KL(policy || reference) from the log-probs of sampled tokens."""

    kind = "kl"
    from_logits: ClassVar[bool] = False
    """Whether it is exact over the vocabulary: then `kl_of_logits` is called instead of `kl`."""

    stops_gradients: ClassVar[bool] = False
    """Whether its gradient is another estimator's than its value (k1_plus)."""

    def ratio_source(self) -> Literal["old", "rollout", "policy"] | None:
        """Which importance ratio `kl` is to be given: against the old or the engine's log-probs, or
        the policy loss's own. None = it takes none."""
        return None

    @abstractmethod
    def kl(self, logprobs: Tensor, ref_logprobs: Tensor, ratio: Tensor | None = None) -> Tensor:
        """KL [B, T] in nats; gradient flows through `logprobs` [B, T] and `ratio` [B, T]."""

    def kl_of_logits(self, logits: Tensor, ref_logits: Tensor) -> Tensor:
        """KL [N] in nats of two vocabularies' logits [N, V]; only with `from_logits`."""
        raise RunError(
            f"kl '{self.name}' works on sampled tokens: call `kl`, or set from_logits and override "
            "`kl_of_logits`"
        )


class KlController(StatefulPlugin[ConfigT]):
    """Decides the KL coefficient; its `state` is checkpointed."""

    kind = "kl_controller"

    @abstractmethod
    def coefficient(self) -> float:
        """The coefficient in force."""

    def update(self, kl_per_token: float, kl_per_sequence: float, num_rows: int) -> None:
        """Receives the measured KL (nats) after each rollout batch; a fixed controller ignores
        it.
        """

    def target(self) -> tuple[Literal["token", "sequence"], float] | None:
        """The KL (nats per token, or per response) that it steers to; None if it does not."""
        return None


class StartConfig(PluginConfig):
    """Settings of every controller that moves its coefficient: where it starts."""

    coef: float


StartConfigT = TypeVar("StartConfigT", bound=StartConfig)


class MovingController(KlController[StartConfigT]):
    """A controller whose whole state is the coefficient in force; `update` sets `coef`."""

    def __init__(self, config: StartConfigT) -> None:
        super().__init__(config)
        self.coef = config.coef

    def coefficient(self) -> float:
        return self.coef

    def state(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state(self, state: Mapping[str, float]) -> None:
        self.coef = state["coef"]


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
