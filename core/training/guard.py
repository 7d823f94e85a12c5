"""The KL guard: what to do when a rollout batch has moved the policy too far.

Several updates on one batch drift away from the policy that sampled it; past a bound the batch no
longer says which way to go.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class KlGuard:
    """Bound on the KL from the rollout's policy (k3, nats per token, on a mini-batch).

    Beyond it `stop` gives up the rest of the batch's updates, this one included; `lower_rate`
    multiplies the learning rate by `factor` for each update that finds the bound exceeded.
    """

    max_kl: float
    action: Literal["stop", "lower_rate"]
    factor: float = 0.5

    def exceeded(self, kl: float) -> bool:
        """Whether the measured `kl` is beyond the bound."""
        return kl > self.max_kl
