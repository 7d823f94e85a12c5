"""Rollout batches for checks of the maths."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from posttrain.core.batch import COLUMN_AXES, RolloutBatch
from posttrain.core.kit.checks import broken, expect
from posttrain.core.math.masking import row_sums

NAN = float("nan")
ALWAYS = frozenset(
    "prompt_ids prompt_mask response_ids response_mask mask group_id seq_id truncated "
    "rollout_logprobs policy_version".split()
)
"""Columns of every batch, whoever made it."""
EPSILON = 1e-6
"""The step of finite differences, in float64."""
LENGTHS = (4, 1, 0, 3, 5, 2, 0, 5)
GROUPS = (0, 0, 0, 1, 1, 2, 3, 3)
# Where the scored steps of each row end; -1 = no step.
STEP_ENDS = ((1, 3), (0, -1), (-1, -1), (2, -1), (0, 4), (1, -1), (-1, -1), (2, 4))
# Where the turns of each row end, and the state that each began in.
TURN_ENDS = ((0, 3), (0, -1), (-1, -1), (2, -1), (1, 4), (1, -1), (-1, -1), (1, 4))
STATES = ((7, 7), (7, 0), (0, 0), (7, 0), (7, 8), (7, 0), (0, 0), (7, 7))


def build_batch(
    mask: Tensor | Sequence[Sequence[float]],
    *,
    response_mask: Tensor | None = None,
    group_id: Sequence[int] | None = None,
    scored: Sequence[bool] | None = None,
    **columns: Tensor,
) -> RolloutBatch:
    """A batch of float64 columns [B, T] around `mask`; every row is its own group unless given."""
    mask = torch.as_tensor(mask, dtype=torch.float64)
    num_rows, width = mask.shape
    filled = dict(columns)
    if "token_rewards" in columns:
        filled["scored"] = torch.tensor(scored if scored is not None else [True] * num_rows)
    batch = RolloutBatch(
        prompt_ids=torch.ones(num_rows, 1, dtype=torch.int64),
        prompt_mask=torch.ones(num_rows, 1, dtype=torch.bool),
        response_ids=torch.ones(num_rows, width, dtype=torch.int64),
        response_mask=mask if response_mask is None else response_mask,
        mask=mask,
        rollout_logprobs=torch.zeros(num_rows, width),
        policy_version=torch.zeros(num_rows, width, dtype=torch.int64),
        group_id=torch.tensor(list(group_id if group_id is not None else range(num_rows))),
        seq_id=torch.arange(num_rows),
        truncated=torch.zeros(num_rows, dtype=torch.bool),
    )
    return batch.with_columns(**filled) if filled else batch


def without_columns(batch: RolloutBatch, kept: Set[str]) -> RolloutBatch:
    """The batch with no other optional columns than those that are `kept`."""
    absent: dict[str, Any] = dict.fromkeys(COLUMN_AXES.keys() - ALWAYS - kept)  # Any: of any axes
    return replace(batch, **absent)


def masked_positions() -> Tensor:
    """The tokens [B, T] of a ragged batch."""
    return torch.arange(max(LENGTHS))[None, :] < torch.tensor(LENGTHS)[:, None]


def ragged_batch(under_the_mask: float, seed: int = 0) -> RolloutBatch:
    """Rows of 0 to 5 tokens in groups of 1 to 3, one row unscored, with every column filled.

    `under_the_mask` stands at every masked position of every per-token column.
    """
    noise = torch.Generator().manual_seed(seed)
    mask = masked_positions()
    row = torch.arange(len(LENGTHS))

    def column(scale: float) -> Tensor:
        values = scale * torch.randn(mask.shape, generator=noise, dtype=torch.float64)
        return torch.where(mask, values, torch.full_like(values, under_the_mask))

    def rows(scale: float) -> Tensor:
        return scale * torch.randn(len(LENGTHS), 2, generator=noise, dtype=torch.float64)

    scored = row != 4
    token_rewards = column(1.0)
    step_end, step_score = torch.tensor(STEP_ENDS), rows(1.0)
    nothing = torch.full_like(step_score, under_the_mask)
    batch = build_batch(
        (mask & scored[:, None]).double(),
        response_mask=mask.double(),
        group_id=GROUPS,
        scored=scored.tolist(),
        token_rewards=token_rewards,
        old_logprobs=column(0.5) - 1,
        ref_logprobs=column(0.5) - 1,
        entropy=column(0.1),
        values=column(1.0),
        advantages=column(1.0),
        rewards=row_sums(token_rewards, mask),
        acc=(row % 2).double(),
        reward_components=torch.where((row == 0)[:, None] & (torch.arange(2) == 1), NAN, rows(1.0)),
        bootstrap_value=rows(1.0)[:, 0],
        baseline_reward=torch.where(row == 5, NAN, 0.25),
        agent_id=row % 2,
        step_end=step_end,
        step_score=torch.where(step_end >= 0, step_score, nothing),
        node_id=torch.where(mask, row[:, None].clamp(max=1), -1),
        sum_pi_squared=column(0.01).abs() + 0.9,
        process_rewards=column(0.3),
        is_weight=column(0.1) + 1,
        turn_end=(turn_end := torch.tensor(TURN_ENDS)),
        turn_reward=torch.where(turn_end >= 0, rows(1.0), nothing),
        state_key=torch.tensor(STATES),
        teacher_logprobs=column(0.5) - 1,
        teacher_topk_ids=torch.where(mask, row[:, None], -1)[:, :, None].expand(-1, -1, 2).clone(),
        teacher_topk_logprobs=torch.stack([column(0.1) - 1, column(0.1) - 2], dim=2),
        teacher_id=torch.zeros_like(row),
    )
    return replace(batch, truncated=row % 3 == 0)


def policy_batch(under_the_mask: float) -> tuple[RolloutBatch, Tensor]:
    """A ragged batch with one advantage per row, and the policy's log-probs [B, T]."""
    batch = ragged_batch(under_the_mask)
    noise = torch.Generator().manual_seed(9)
    new = 0.5 * torch.randn(batch.mask.shape, generator=noise, dtype=torch.float64) - 1
    new = torch.where(masked_positions(), new, under_the_mask)
    # Both signs in a group, for losses that compare its answers.
    signs = torch.linspace(-1.5, 2.0, len(LENGTHS), dtype=torch.float64)
    signs = torch.stack((signs[:4], signs[4:].flip(0)), dim=1).flatten()[:, None]
    advantages = torch.where(masked_positions(), signs, under_the_mask)
    return batch.with_columns(advantages=advantages, logprobs_now=new), new


def expect_same(
    found: Tensor, wanted: Tensor, what: str, *, rtol: float = 0.0, atol: float = 0.0
) -> None:
    """End a check unless two tensors are equal, NaN where NaN, to `rtol` and `atol`."""
    found, wanted = found.detach(), wanted.detach()
    if found.shape != wanted.shape:
        broken(f"{what}: the shape is {list(found.shape)}, expected {list(wanted.shape)}")
    if not torch.allclose(found, wanted.to(found.dtype), rtol=rtol, atol=atol, equal_nan=True):
        gap = (found - wanted).abs()
        at = tuple(int(i) for i in torch.unravel_index(gap.nan_to_num(1e300).argmax(), gap.shape))
        broken(f"{what}: at {list(at)} got {float(found[at])!r}, expected {float(wanted[at])!r}")


def expect_rows_apart(of: Callable[[RolloutBatch], Tensor]) -> None:
    """That permuting the rows of a batch permutes what `of` makes of it."""
    batch, order = ragged_batch(0.0), torch.tensor([5, 2, 7, 0, 4, 1, 6, 3])
    permuted = of(batch.select(order))
    expect_same(permuted, of(batch)[order], "rows in another order", rtol=1e-7, atol=1e-7)


def expect_slope(
    grad: Tensor,
    direction: Tensor,
    *totals: Callable[[float], float],
    tolerance: float = 1e-5,
    hint: str = "",
) -> None:
    """That autograd's `grad`, along `direction`, is the slope of a total by finite differences.

    Each of `totals` gives the total for a step along the direction; one of them has to agree.
    """
    found = float((grad * direction).sum())
    wanted = [(total(EPSILON) - total(-EPSILON)) / (2 * EPSILON) for total in totals]
    expect(
        any(abs(found - each) <= tolerance * max(1.0, abs(each)) for each in wanted),
        f"along a direction autograd has {found:.6g}, finite differences {wanted[0]:.6g}{hint}",
    )
