"""PF-PPO: the rows of a rollout batch drawn again, with replacement, by what they earned."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from posttrain.core.batch import RolloutBatch
from posttrain.core.math.groups import outcome_rewards
from posttrain.core.math.shaping import resampling_weights

Method = Literal["pow", "max_min", "max_random"]


def resample(
    batch: RolloutBatch, method: Method, power: float, generator: torch.Generator
) -> RolloutBatch:
    """As many rows as `batch` has, drawn from its scored ones; advantages stay as they are.

    A noisy reward model errs most on middling answers, so the extremes are drawn more often. Rows
    of a group stay adjacent. With nothing scored the batch is returned as it is.
    Source: Policy Filtration for RLHF, arXiv:2409.06957, section 3.
    """
    scored = batch.column("scored").bool().nonzero().squeeze(1)
    if scored.numel() == 0:
        return batch
    weights = resampling_weights(outcome_rewards(batch)[scored], method, power)
    drawn = torch.multinomial(weights, len(batch), replacement=True, generator=generator)
    rows = scored[drawn].sort().values
    return replace(batch.select(rows), seq_id=torch.arange(len(batch)))
