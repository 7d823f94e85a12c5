"""The critic: a value model with its own optimizer, and its part of an RL step.

Axes: B rows, T response tokens, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Linear, functional
from transformers import PreTrainedModel

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import Aggregator, Counts, TokenLoss
from posttrain.core.math.returns import explained_variance, rewards_to_go, value_loss
from posttrain.core.models.sharded import put_away
from posttrain.core.training.finite import note_suspects
from posttrain.core.training.forward import after_last, response_states, to_rows
from posttrain.core.training.metrics import MetricSums
from posttrain.core.training.optim import MasterOptimizer, StoredOptimizer
from posttrain.core.training.ranks import ALONE, Ranks, add_gradients, in_place
from posttrain.core.training.splitting import Splitting

SLOPE_WINDOW = 10  # steps over which the rise of the explained variance is judged


def response_values(model: PreTrainedModel, batch: RolloutBatch) -> tuple[Tensor, Tensor]:
    """V(s_t) [B, T], s_t the prefix *before* token t, and the value [B] after the last token.

    0 where `response_mask` is 0; a row without tokens is valued at the end of its prompt. Both
    carry gradients and are in at least float32: the head is applied in that precision, because a
    bfloat16 value has but three digits.
    """
    hidden, _, mask, _ = response_states(model, batch, include_last=True)
    head: Linear = model.get_submodule("score")  # type: ignore[assignment]
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    bias = None if head.bias is None else head.bias.to(dtype)

    def read(states: Tensor) -> Tensor:
        return functional.linear(states.to(dtype), head.weight.to(dtype), bias).squeeze(-1)

    before = hidden[:, : mask.shape[1]][mask]
    return to_rows(read(before), mask, batch.response_ids.shape), read(after_last(hidden, mask))


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSettings(Splitting):
    """How the critic is trained on a rollout batch.

    `clip` bounds a value's move from the one the advantages were made of (None = off);
    `huber_delta` makes the error linear beyond it (None = squared throughout).
    """

    aggregator: Aggregator[Any]
    seed: int
    clip: float | None = 0.2
    huber_delta: float | None = None


class Critic:
    """A sequence classifier with the scalar head `score`, its optimizer, and its update.

    `check` runs between micro-batches (it raises to stop).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: MasterOptimizer,
        settings: CriticSettings,
        ranks: Ranks = ALONE,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.model, self.optimizer, self.settings = model, optimizer, settings
        self.ranks, self.check = ranks, check

    @property
    def stored(self) -> StoredOptimizer:
        return self.optimizer

    @torch.no_grad()
    def values(self, batch: RolloutBatch) -> tuple[Tensor, Tensor]:
        """`values` [B, T] and `bootstrap_value` [B] of the present critic, float32."""
        rows, values, bootstrap = [], [], []
        for index, counts in self.ranks.share(self.settings.micro_rows(batch, self.ranks.size)):
            self.check()
            found = response_values(self.model, batch.select(index))
            if counts:
                rows.append(index)
                values.append(found[0].float())
                bootstrap.append(found[1].float())
        put_away(self.model)
        shape = batch.response_ids.shape
        return (
            self.ranks.add(in_place(rows, values, shape)),
            self.ranks.add(in_place(rows, bootstrap, shape[:1])),
        )

    def update(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        """All epochs and mini-batches of regression on `returns` [B, T], from `values` [B, T].

        `value/ev` is of `values`, those the advantages were made of, before the update; it is left
        out where the returns do not vary.
        """
        batch.require(["values", "returns"], "the critic")
        settings = self.settings
        old, returns, mask = batch.column("values"), batch.column("returns"), batch.mask
        sums, rate = MetricSums(), 0.0
        sums.add("value/mean", old, mask)
        parts = settings.mini_batches(batch, settings.seed, "critic_mini_batches", step)
        for rows, mini in parts:
            own = MetricSums()
            loss = self._accumulate(mini, own)
            report = self.optimizer.step(loss=loss, rows=own.blamed(rows))
            rate = report.learning_rate
            if report.non_finite:
                sums.add_scalar("value/non_finite", 1.0)
                continue
            sums.merge(own)
            sums.add_means({"loss/value": loss, "value/grad_norm": report.grad_norm})
        metrics = sums.result() | {"value/lr": rate}
        explained = explained_variance(old, returns, mask)
        return metrics if math.isnan(explained) else metrics | {"value/ev": explained}

    def _accumulate(self, mini: RolloutBatch, sums: MetricSums) -> float:
        order, own = self.settings.micro_rows(mini, self.ranks.size), MetricSums()
        totals = self.settings.aggregator.count(mini.mask, mini.group_id)
        totals = replace(totals, num_parts=len(order))
        for rows, counts in self.ranks.share([rows for rows in order if mini.mask[rows].any()]):
            self.check()
            micro = mini.select(rows)
            loss, clipped = self._loss(micro, totals.rows(rows))
            if counts:
                own.add("value/clip_frac", clipped.double(), micro.mask)
                own.add_scalar("loss", loss.detach())
                note_suspects(own, loss, rows.tolist(), micro.returns, micro.values)
            add_gradients(loss, counts)
        own = self.ranks.merge(own)
        total = own.pop("loss", default=0.0)
        sums.merge(own)
        return total

    def _loss(self, micro: RolloutBatch, counts: Counts) -> tuple[Tensor, Tensor]:
        """This micro-batch's share of the loss, and where [B, T] the clip decided it."""
        values, _ = response_values(self.model, micro)
        loss, clipped = value_loss(
            values.cpu(),
            micro.column("values"),
            micro.column("returns"),
            micro.mask,
            clip=self.settings.clip,
            huber=self.settings.huber_delta,
        )
        share = self.settings.aggregator.aggregate(
            TokenLoss(loss, micro.mask), micro.mask, counts, micro.group_id
        )
        return share, clipped


class ValueModel(Protocol):
    """A critic: `Critic` in this process, `RankedCritic` on ranks."""

    @property
    def stored(self) -> StoredOptimizer:
        """What a checkpoint keeps of the critic."""

    def values(self, batch: RolloutBatch) -> tuple[Tensor, Tensor]:
        """`values` [B, T] and `bootstrap_value` [B] of the present critic, float32."""

    def update(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        """Regression of the critic on `returns` [B, T], from `values` [B, T]."""


class ValuePhase:
    """A critic with `pretrain_steps` rollout batches, at most, before the policy moves.

    Value pre-training (VAPO, arXiv:2504.05118, section 3.1): while the policy stands still, the
    critic alone is fitted to Monte-Carlo returns, until its explained variance rises no more.
    """

    def __init__(self, critic: ValueModel, *, pretrain_steps: int, pretrain_slope: float) -> None:
        self.critic = critic
        self.pretrain_steps, self.pretrain_slope = pretrain_steps, pretrain_slope
        self._explained: list[float] = []
        self._left = pretrain_steps
        self.pretraining = pretrain_steps > 0

    @property
    def stored(self) -> StoredOptimizer:
        """What a checkpoint keeps of the critic."""
        return self.critic.stored

    def with_values(self, batch: RolloutBatch) -> RolloutBatch:
        """`batch` with `values` and `bootstrap_value` of the present critic."""
        values, bootstrap = self.critic.values(batch)
        return batch.with_columns(values=values, bootstrap_value=bootstrap)

    def update(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        """One pass of the critic, and whether the policy may move from this step on.

        `pretraining` is true for the steps that belong to the critic alone, this one included.
        """
        self.pretraining = self._left > 0
        if not self.pretraining:
            return self.critic.update(batch, step) | {"value/pretraining": 0.0}
        returns = monte_carlo_returns(batch)
        metrics = self.critic.update(batch.with_columns(returns=returns), step)
        self._left -= 1
        if "value/ev" in metrics:
            self._explained.append(metrics["value/ev"])
        if len(self._explained) > SLOPE_WINDOW:
            rise = self._explained[-1] - self._explained[-1 - SLOPE_WINDOW]
            if rise / SLOPE_WINDOW < self.pretrain_slope:
                self._left = 0
        return metrics | {"value/pretraining": 1.0}

    def state(self) -> dict[str, float]:
        """What a checkpoint must keep with the critic's weights."""
        window = self._explained[-1 - SLOPE_WINDOW :]
        return {"left": float(self._left)} | {f"ev_{i}": ev for i, ev in enumerate(window)}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Continue from `state`."""
        self._left = int(state["left"])
        self._explained = [state[f"ev_{i}"] for i in range(len(state) - 1)]
        self.pretraining = self._left > 0


def monte_carlo_returns(batch: RolloutBatch) -> Tensor:
    """Undiscounted rewards-to-go [B, T]: what the critic is fitted to before the policy moves."""
    return rewards_to_go(batch.column("token_rewards"), batch.response_mask, gamma=1.0)
