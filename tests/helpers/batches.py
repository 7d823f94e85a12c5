"""Small rollout batches for tests of the maths."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from posttrain.core.batch import RolloutBatch


def build_batch(
    mask: Tensor | Sequence[Sequence[float]],
    *,
    response_mask: Tensor | None = None,
    group_id: Sequence[int] | None = None,
    scored: Sequence[bool] | None = None,
    **columns: Tensor,
) -> RolloutBatch:
    """A batch of float64 columns [B, T] around `mask`; every row is its own group unless
    reported.
    """
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
