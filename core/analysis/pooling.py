"""Recorded steps as one pool of groups, and batches drawn from it.

Axes: B rows, T response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from posttrain.core.analysis.frozen import FrozenMini, FrozenStep
from posttrain.core.batch import COLUMN_AXES, NOT_COLUMNS, RolloutBatch

_NUMBERED = ("group_id", "episode_id", "node_id")
"""Columns of numbers that mean something within a batch alone."""
_ABSENT = {"step_end": -1, "turn_end": -1, "step_score": float("nan"), "turn_reward": float("nan")}
_OF_TEACHERS = ("teacher_topk", "teacher_prompt", "teacher_response", "text_group", "teacher_text")


def pooled(steps: Sequence[FrozenStep]) -> FrozenStep:
    """All rows of `steps` as one step of one mini-batch, with the columns that all of them have.

    Texts and what teachers read are left out. Numbers of groups are made distinct.
    """
    names = set.intersection(*(step.batch.columns() for step in steps))
    names -= {name for name in names if name.startswith(_OF_TEACHERS)}
    columns: dict[str, Any] = dict.fromkeys(COLUMN_AXES)  # Any: `replace` checks each field's type
    for name in names:
        columns[name] = _stacked(name, [step.batch.column(name) for step in steps])
    columns |= dict.fromkeys(NOT_COLUMNS, ())
    batch = replace(steps[0].batch, **columns)
    known = [step.entropy for step in steps if step.entropy is not None]
    return _whole(
        replace(
            steps[0],
            logprobs=_stacked("logprobs", [step.logprobs for step in steps]),
            entropy=_stacked("entropy", known) if len(known) == len(steps) else None,
            read=torch.cat([step.read for step in steps]),
        ),
        batch,
    )


def drawn(pool: FrozenStep, groups: Sequence[Tensor]) -> tuple[FrozenStep, Tensor]:
    """A step of one mini-batch from the rows of each of `groups`, and these rows [n] of the pool.

    A group that is drawn twice is two groups.
    """
    rows = torch.cat(list(groups))
    draw = torch.repeat_interleave(
        torch.arange(len(groups)), torch.tensor([len(group) for group in groups])
    )
    batch = pool.batch.select(rows)
    own = {"group_id": draw, "seq_id": torch.arange(len(rows))}
    for name in _NUMBERED[1:]:
        if (column := getattr(batch, name)) is not None:
            shift = draw.view(-1, *[1] * (column.dim() - 1)) * (int(column.max()) + 1)
            own[name] = torch.where(column >= 0, column + shift, column)
    step = replace(
        pool,
        logprobs=pool.logprobs[rows],
        entropy=None if pool.entropy is None else pool.entropy[rows],
        read=pool.read[rows],
    )
    return _whole(step, batch.with_columns(**own)), rows


def _whole(step: FrozenStep, batch: RolloutBatch) -> FrozenStep:
    rows = torch.arange(len(batch))
    mini = FrozenMini(0, rows, torch.ones(len(batch), dtype=torch.bool))
    return replace(step, batch=batch, minis=(mini,))


def _stacked(name: str, parts: Sequence[Tensor]) -> Tensor:
    """The rows of all `parts`, padded to the widest: prompts on the left, all else on the right."""
    width = max(part.shape[1] for part in parts) if parts[0].dim() > 1 else 0
    shift, found = 0, []
    for part in parts:
        if name in _NUMBERED:
            lowest = part >= 0
            part = torch.where(lowest, part + shift, part)
            shift = max(shift, int(part.max()) + 1)
        if part.dim() > 1 and part.shape[1] < width:
            extra = width - part.shape[1]
            sides = (extra, 0) if name.startswith("prompt_") else (0, extra)
            part = functional.pad(part, sides, value=_ABSENT.get(name, 0))
        found.append(part)
    return torch.cat(found)
