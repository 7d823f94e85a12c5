"""Policy losses on small batches: token by token, and through the objective in any cut."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from posttrain.core.batch import COLUMN_AXES, RolloutBatch
from posttrain.core.contracts import Aggregator, PolicyLoss, TokenLoss
from posttrain.core.kit.batches import build_batch
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.training.objective import LossTerm, Objective, PreparedMini

MANAGER = PluginManager()
LENGTHS = (4, 1, 0, 3, 5, 2, 0, 5)
GROUPS = (0, 0, 0, 1, 1, 2, 3, 3)

# Fields under which a plugin's bounds, shares and thresholds act on a small batch.
ACTIVE: dict[str, dict[str, object]] = {
    "gspo": {"clip_low": 0.1, "clip_high": 0.1},
    "gspo_token": {"clip_low": 0.1, "clip_high": 0.1},
    "cispo": {"clip_low": 0.2, "clip_high": 0.2},
    "gmpo": {"log_clip_low": 0.2, "log_clip_high": 0.2},
    "dppo": {"delta_low": 0.05, "delta_high": 0.05, "ratio_max": 1.3},
    "clip_cov": {"cov_ratio": 0.2, "cov_low": -0.5, "cov_high": 5.0},
    "kl_cov": {"cov_ratio": 0.2},
    "dual_clip": {"dual_clip_c": 1.3},
    "fipo": {"half_life": 2.0},
    "real": {"positive": "acc"},
}


def build_loss(name: str, fields: Mapping[str, object] | None = None) -> PolicyLoss[Any]:
    return MANAGER.build(PolicyLoss, name, fields)


def build_aggregator(name: str, fields: Mapping[str, object] | None = None) -> Aggregator[Any]:
    length = {"norm_length": 8} if name == "seq-mean-token-sum-norm" else {}
    return MANAGER.build(Aggregator, name, length | dict(fields or {}))


def objective_of(loss: PolicyLoss[Any], aggregator: str = "token-mean", **rest: Any) -> Objective:
    """An objective of one term; `rest` are the objective's other fields."""
    plugin = build_aggregator(aggregator)
    return Objective((LossTerm(loss, plugin),), plugin, **rest)


def token_loss(
    name: str,
    ratios: Sequence[Sequence[float]],
    advantages: Sequence[Sequence[float]],
    **fields: object,
) -> tuple[TokenLoss, Tensor]:
    """Token losses of rows with these probability ratios, and their summed gradient [B, T]."""
    loss = build_loss(name, fields)
    new = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()
    batch = build_batch(
        torch.ones(new.shape),
        old_logprobs=torch.zeros_like(new),
        rollout_logprobs=torch.zeros_like(new),
        logprobs_now=new,
        advantages=torch.tensor(advantages, dtype=torch.float64),
    )
    prepared = loss.prepare(batch, torch.Generator()) if loss.needs_prepare() else None
    result = loss.token_loss(new, batch, prepared)
    (grad,) = torch.autograd.grad(result.loss.sum(), new)
    return result, grad


def policy_batch(
    seed: int,
    lengths: Sequence[int] = LENGTHS,
    groups: Sequence[int] = GROUPS,
    *,
    on_policy: bool = False,
    spread: float = 0.3,
) -> tuple[RolloutBatch, Tensor]:
    """A batch with every column that a policy loss reads, and the policy's log-probs [B, T].

    One advantage per row, 0 among them; a row of three tokens or more has a hole in its mask. The
    log-probs of the policy now are the returned ones.
    """
    noise = torch.Generator().manual_seed(seed)
    num_rows, width = len(lengths), max(1, *lengths)
    mask = (torch.arange(width)[None, :] < torch.tensor(lengths)[:, None]).double()
    mask[torch.tensor(lengths) >= 3, 1:2] = 0

    def column(scale: float) -> Tensor:
        return scale * torch.randn(num_rows, width, generator=noise, dtype=torch.float64)

    old = -1 - column(1.0).abs()
    new = old if on_policy else old + column(spread)
    advantages = torch.randn(num_rows, 1, generator=noise, dtype=torch.float64)
    advantages[0] = 0
    batch = build_batch(
        mask,
        group_id=groups,
        old_logprobs=old,
        ref_logprobs=old + column(0.1),
        rollout_logprobs=old if on_policy else old + column(0.05),
        logprobs_now=new,
        entropy=column(1.0).abs(),
        advantages=torch.where(mask.bool(), advantages, 0.0),
        acc=(torch.arange(num_rows) % 2).double(),
        teacher_logprobs=old + column(0.2),
        teacher_id=torch.zeros(num_rows, dtype=torch.int64),
    )
    return batch, new.clone()


def widened(batch: RolloutBatch, logprobs: Tensor, extra: int) -> tuple[RolloutBatch, Tensor]:
    """The same with `extra` padded positions on the right, NaN in every column of numbers."""

    def wider(values: Tensor, fill: float) -> Tensor:
        fill = fill if values.is_floating_point() else 0
        return torch.nn.functional.pad(values, (0, extra), value=fill)

    columns: dict[str, Any] = {}  # Any: `replace` checks each field's type
    for name in batch.columns():
        if COLUMN_AXES[name] == "BT":
            columns[name] = wider(getattr(batch, name), 0.0 if "mask" in name else math.nan)
    return replace(batch, **columns), wider(logprobs, math.nan)


def total_and_grad(
    objective: Objective,
    batch: RolloutBatch,
    logprobs: Tensor,
    ranks: Sequence[Sequence[Sequence[int]]] | None = None,
    *,
    kl_coef: float = 0.0,
    step: int = 0,
) -> tuple[Tensor, Tensor]:
    """The loss and its gradient [B, T], from the rows of each micro-batch of each rank.

    Ranks average their gradients, micro-batches of one rank add theirs up. None = one of each.
    """
    ranks = [[range(len(batch))]] if ranks is None else ranks
    new = logprobs.clone().requires_grad_()
    batch, _ = objective.correct(batch)
    draw = torch.Generator().manual_seed(5)
    prepared = on_ranks(objective.prepare(batch, draw, len(ranks[0]), step), len(ranks))
    total = torch.zeros((), dtype=torch.float64)
    for micro_batches in ranks:
        for rows in micro_batches:
            index = torch.tensor(list(rows), dtype=torch.int64)
            micro = batch.select(index)
            entropy = -new[index]  # anything with a gradient
            loss = objective.loss(new[index], entropy, micro, prepared.rows(index), kl_coef)
            total = total + loss.total / len(ranks)
    (grad,) = torch.autograd.grad(total, new)
    return total.detach(), grad


def on_ranks(prepared: PreparedMini, num_ranks: int) -> PreparedMini:
    """`prepared` as each of `num_ranks` data-parallel ranks has it."""
    return replace(
        prepared,
        term_counts=tuple(
            tuple(replace(c, num_ranks=num_ranks) for c in counts)
            for counts in prepared.term_counts
        ),
        counts=replace(prepared.counts, num_ranks=num_ranks),
        entropy_counts=replace(prepared.entropy_counts, num_ranks=num_ranks),
    )
