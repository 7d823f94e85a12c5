"""What advantage estimators promise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from posttrain.core.batch import COLUMN_AXES, RolloutBatch
from posttrain.core.errors import RunError
from posttrain.core.kit.batches import (
    LENGTHS,
    NAN,
    expect_rows_apart,
    expect_same,
    ragged_batch,
    without_columns,
)
from posttrain.core.kit.checks import Subject, check, expect


def advantages(subject: Subject, batch: RolloutBatch) -> Tensor:
    found: Tensor = subject.build().estimate(batch).advantages
    return found


@check("advantages are [B, T], finite, detached and exactly 0 under the mask", "advantage")
def _shape_and_mask(subject: Subject) -> None:
    dirty = ragged_batch(NAN)
    got = advantages(subject, dirty)
    expect(got.shape == dirty.mask.shape, f"the shape is {list(got.shape)}, not [B, T]")
    expect(not got.requires_grad, "they carry a gradient")
    expect(got.isfinite().all(), "some are not finite where masked positions hold NaN")
    differs = bool(got.abs().max() > 0)
    expect(differs is not subject.cls.is_zero, "all are 0 on rewards that differ, or say is_zero")
    expect(not got[~dirty.mask.bool()].any(), "some are not 0 under the mask")
    expect_same(got, advantages(subject, ragged_batch(0.25)), "what lies under the mask matters")


@check("permuting the rows permutes the advantages", "advantage")
def _permutation(subject: Subject) -> None:
    expect_rows_apart(lambda batch: advantages(subject, batch))


@check("advantages are the same each time", "advantage")
def _determinism(subject: Subject) -> None:
    first, second = (advantages(subject, ragged_batch(0.0)) for _ in range(2))
    expect_same(first, second, "two plugins, one batch")


@check("advantages have the dtype of the rewards, to its precision", "advantage")
def _dtype(subject: Subject) -> None:
    batch = ragged_batch(0.0)
    columns = {name: getattr(batch, name) for name in COLUMN_AXES}
    floats: dict[str, Any] = {  # Any: columns of any axes
        name: column.float()
        for name, column in columns.items()
        if column is not None and column.is_floating_point()
    }
    single = replace(batch, **floats)
    got = advantages(subject, single)
    expect(got.dtype == torch.float32, f"they are {got.dtype} for rewards in float32")
    wanted = advantages(subject, batch)
    expect_same(got.double(), wanted, "float32 against float64", rtol=1e-3, atol=1e-4)


@check("wider padding changes nothing", "advantage")
def _padding(subject: Subject) -> None:
    batch = ragged_batch(0.0)
    wider: dict[str, Any] = {  # Any: as above
        name: torch.nn.functional.pad(column, (0, 3), value=-1.0 if name == "node_id" else 0.0)
        for name, axes in COLUMN_AXES.items()
        if axes == "BT" and (column := getattr(batch, name)) is not None
    }
    got = advantages(subject, replace(batch, **wider))
    expect_same(got[:, :-3], advantages(subject, batch), "three columns more", rtol=1e-9, atol=1e-9)
    expect(not got[:, -3:].any(), "padding has advantages")


@check("it reads no column that it does not declare", "advantage")
def _declared(subject: Subject) -> None:
    batch = ragged_batch(0.0)
    kept = subject.build().required_columns() | {"scored", "token_rewards"}
    bare = without_columns(batch, kept)
    expect_same(advantages(subject, bare), advantages(subject, batch), "without other columns")


@check("an unscored row teaches nothing, even when it is in the mask", "advantage")
def _unscored(subject: Subject) -> None:
    batch = ragged_batch(0.25)
    lost = (~batch.column("scored"))[:, None]
    nan = {
        name: torch.where(lost, NAN, batch.column(name))
        for name in ("token_rewards", "values", "step_score", "reward_components", "old_logprobs")
    }
    kept = replace(batch, mask=batch.response_mask).with_columns(**nan)
    expect_same(advantages(subject, kept), advantages(subject, batch), "with the row in the mask")


@check("odd batches give finite advantages", "advantage")
def _odd_batches(subject: Subject) -> None:
    """Rows without tokens, of one token, alone in their group, and all truncated."""
    batch = ragged_batch(NAN)
    for lengths in ((0, 0), (1, 1), (0, 3), (3,), (0,), (1,), ()):
        wanted = [next(i for i, n in enumerate(LENGTHS) if n == length) for length in lengths]
        odd = batch.select(torch.tensor(wanted, dtype=torch.int64))
        ones = torch.ones(len(lengths))
        odd = replace(odd, group_id=ones.long(), truncated=ones.bool())
        estimate = subject.build().estimate(odd)
        what = f"a group of rows of {list(lengths)} tokens"
        expect(estimate.advantages.isfinite().all(), f"{what}: not finite")
        returns = estimate.returns
        expect(returns is None or returns.isfinite().all(), f"{what}: returns are not finite")
        if len(lengths) == 1 and subject.build().smallest_group() > 1:
            expect(
                estimate.advantages.abs().sum() == 0,
                f"{what}: a group of one has nothing to compare, and its advantage is not 0",
            )


@check("rewards of single tokens reach the result, or are refused", "advantage")
def _token_rewards(subject: Subject) -> None:
    batch = ragged_batch(0.0)
    penalty = 0.5 * torch.arange(batch.mask.shape[1])
    moved = batch.with_columns(token_rewards=batch.column("token_rewards") - penalty)
    if not subject.build().reads_token_rewards():
        try:
            advantages(subject, moved)
        except RunError:
            return
        expect(False, "it reads no rewards of tokens and takes a batch that has them")
    else:
        same = torch.allclose(advantages(subject, moved), advantages(subject, batch))
        expect(not same, "it says reads_token_rewards, and they change nothing")
