"""What a step on given answers was computed from, kept for the token microscope.

Axes: B answers, T answer tokens, N pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.training.ranks import Ranks


@dataclass
class StepReadings:
    """Filled by the step that is given one.

    `seen` [B, T] is what the model said, before its update: `logprobs` and `entropy` (nats) of each
    token, `log_sum_sq` (log of the sum of squared probabilities, for WPO), or `scores` of a reward
    model where `scored` is 1. `given` is what else the loss reads: `margin` [N] of pairs whose
    answers are rows 2i (chosen) and 2i + 1; `desirable` [B]; `kl_scores` [B], log-ratios of KTO's
    mismatched answers; `scored` and `labels` [B, T].
    """

    batch: RolloutBatch | None = None
    seen: dict[str, Tensor] = field(default_factory=dict)
    given: dict[str, Tensor] = field(default_factory=dict)

    def begin(
        self, batch: RolloutBatch, seen: Sequence[str], given: Mapping[str, Tensor | None]
    ) -> None:
        """A step on `batch`, of whose tokens `seen` will be known."""
        self.batch = batch
        self.seen = {name: torch.zeros(batch.response_ids.shape) for name in seen}
        self.given = {name: tensor for name, tensor in given.items() if tensor is not None}

    def put(self, rows: Tensor, **values: Tensor | None) -> None:
        """What the model said of the answers `rows` [b], each [b, T]; None = was not asked."""
        for name, value in values.items():
            if value is not None:
                self.seen[name][rows] = value.detach().float().cpu()

    def merge(self, ranks: Ranks) -> None:
        """Each answer was put by one rank: now all of them know it."""
        self.seen = {name: ranks.add(values) for name, values in self.seen.items()}
