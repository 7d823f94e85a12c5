"""The critic's part of an RL step: values before the advantages, its update, its head start.

Value pre-training (VAPO, arXiv:2504.05118, section 3.1): while the policy stands still, the critic
alone is fitted to Monte-Carlo returns, until its explained variance rises no more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.math.returns import rewards_to_go
from posttrain.core.training.critic import Critic
from posttrain.core.training.optim import StoredOptimizer

SLOPE_WINDOW = 10  # steps over which the rise of the explained variance is judged


class ValuePhase:
    """A critic with `pretrain_steps` rollout batches, at most, before the policy moves."""

    def __init__(self, critic: Critic, *, pretrain_steps: int, pretrain_slope: float) -> None:
        self.critic = critic
        self.pretrain_steps, self.pretrain_slope = pretrain_steps, pretrain_slope
        self._explained: list[float] = []
        self._left = pretrain_steps
        self.pretraining = pretrain_steps > 0

    @property
    def stored(self) -> StoredOptimizer:
        return self.critic.stored

    def with_values(self, batch: RolloutBatch, check: Callable[[], None]) -> RolloutBatch:
        """`batch` with `values` and `bootstrap_value` of the present critic."""
        values, bootstrap = self.critic.values(batch, check)
        return batch.with_columns(values=values, bootstrap_value=bootstrap)

    def update(self, batch: RolloutBatch, step: int, check: Callable[[], None]) -> dict[str, float]:
        """One pass of the critic; tells whether the policy may move from this step on."""
        self.pretraining = self._left > 0
        if not self.pretraining:
            return self.critic.update(batch, step, check) | {"value/pretraining": 0.0}
        returns = monte_carlo_returns(batch)
        metrics = self.critic.update(batch.with_columns(returns=returns), step, check)
        self._left -= 1
        if "value/ev" in metrics:
            self._explained.append(metrics["value/ev"])
        if len(self._explained) > SLOPE_WINDOW:
            rise = self._explained[-1] - self._explained[-1 - SLOPE_WINDOW]
            if rise / SLOPE_WINDOW < self.pretrain_slope:
                self._left = 0
        return metrics | {"value/pretraining": 1.0}

    def state(self) -> dict[str, float]:
        window = self._explained[-1 - SLOPE_WINDOW :]
        return {"left": float(self._left)} | {f"ev_{i}": ev for i, ev in enumerate(window)}

    def load_state(self, state: Mapping[str, float]) -> None:
        self._left = int(state["left"])
        self._explained = [state[f"ev_{i}"] for i in range(len(state) - 1)]
        self.pretraining = self._left > 0


def monte_carlo_returns(batch: RolloutBatch) -> Tensor:
    """Undiscounted rewards-to-go [B, T]: what the critic is fitted to before the policy moves."""
    return rewards_to_go(batch.column("token_rewards"), batch.response_mask, gamma=1.0)
