"""Advantages of small batches whose outcome rewards sit on the last token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import AdvantageEstimator, Advantages
from posttrain.core.kit.batches import build_batch
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.rewards.shaping import place_on_last_token

MANAGER = PluginManager()


def outcome_batch(
    rewards: Sequence[float] | Tensor,
    group_id: Sequence[int] | None = None,
    lengths: Sequence[int] | None = None,
    scored: Sequence[bool] | None = None,
    **columns: Tensor,
) -> RolloutBatch:
    """Rows of `lengths` tokens (1 unless reported) of one group unless reported; all scored unless
    reported.
    """
    values = rewards if isinstance(rewards, Tensor) else torch.tensor(rewards, dtype=torch.float64)
    sizes = torch.tensor(lengths if lengths is not None else [1] * len(values))
    mask = (torch.arange(max(1, int(sizes.max())))[None, :] < sizes[:, None]).double()
    return build_batch(
        mask if scored is None else mask * torch.tensor(scored)[:, None],
        response_mask=mask,
        group_id=group_id if group_id is not None else [0] * len(values),
        scored=scored,
        rewards=values,
        token_rewards=place_on_last_token(values, mask),
        **columns,
    )


def estimate(name: str, batch: RolloutBatch, **fields: object) -> Advantages:
    """What the plugin `name` makes of `batch`, built as the pipeline builds it."""
    return MANAGER.build(AdvantageEstimator, name, fields).estimate(batch)


def per_row(
    name: str,
    rewards: Sequence[float] | Tensor,
    group_id: Sequence[int] | None = None,
    **fields: object,
) -> list[float]:
    """Advantages of one-token rows, of one group unless reported."""
    got: list[float] = (
        estimate(name, outcome_batch(rewards, group_id), **fields).advantages[:, 0].tolist()
    )
    return got
