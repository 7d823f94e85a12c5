"""What happens to rewards once they are summed and clipped: overlong filtering, then whitening.

The column `rewards` stays what it was, for metrics and for filters of groups; what estimators read
is `token_rewards`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.math.masking import masked
from posttrain.core.math.running import RunningMoments
from posttrain.core.scoring import place_on_last_token

OverlongFilter = Literal["none", "mask", "exclude"]
Whitening = Literal["none", "batch", "running"]
EPS = 1e-8


def filter_overlong(
    batch: RolloutBatch, rule: OverlongFilter
) -> tuple[RolloutBatch, dict[str, float]]:
    """`batch` without loss on rows that the length limit cut, and the share of such rows.

    `mask` empties their mask and leaves their reward in the statistics of their group; `exclude`
    takes them out of these too. Source: DAPO, arXiv:2503.14476, section 3.4 (overlong filtering).
    """
    if rule == "none":
        return batch, {}
    kept = ~batch.truncated.bool()
    mask = masked(batch.mask, kept[:, None].expand(batch.mask.shape))
    filtered = batch.with_columns(mask=mask)
    if rule == "exclude":
        filtered = filtered.with_columns(scored=batch.column("scored").bool() & kept)
    return filtered, {"reward/overlong_filtered_frac": 1.0 - float(kept.double().mean())}


class RewardShaping:
    """Overlong filtering and whitening of one stage, with what is kept from batch to batch.

    Whitening maps R to (R - mean) / std over the scored rows of the batch, plus the mean again with
    `keep_mean` (`batch`); or to R / std over every reward of the stage so far, this batch included
    (`running`). The deviation is the unbiased one; fewer than two values, or equal ones so far,
    leave the scale alone.
    """

    def __init__(
        self,
        overlong_filter: OverlongFilter = "none",
        whitening: Whitening = "none",
        *,
        keep_mean: bool = False,
    ) -> None:
        self._filter, self._whitening, self._keep_mean = overlong_filter, whitening, keep_mean
        self._moments = RunningMoments()
        self._shift, self._scale, self._offset = 0.0, 1.0, 0.0

    def apply(self, batch: RolloutBatch) -> tuple[RolloutBatch, dict[str, float]]:
        """`batch` with both done, and metrics of them."""
        batch, metrics = filter_overlong(batch, self._filter)
        if self._whitening == "none":
            return batch, metrics
        rewards, scored = batch.column("rewards"), batch.column("scored").bool()
        self._measure(rewards[scored].double())
        white = masked(self.rescaled(rewards), scored).float()
        metrics["reward/whiten_std"] = 1.0 / self._scale
        return (
            batch.with_columns(token_rewards=place_on_last_token(white, batch.response_mask)),
            metrics,
        )

    def rescaled(self, rewards: Tensor) -> Tensor:
        """Other rewards [B] of the same step on the scale of its batch (ReMax's baseline)."""
        if self._whitening == "none":
            return rewards
        return (rewards.double() - self._shift) * self._scale + self._offset

    def _measure(self, values: Tensor) -> None:
        """Set shift and scale by the scored rewards [N] of a batch."""
        batch_moments = RunningMoments()
        batch_moments.update(values)
        if self._whitening == "batch":
            self._scale = _inverse(batch_moments.std())
            self._shift = batch_moments.mean
            self._offset = batch_moments.mean if self._keep_mean else 0.0
        else:
            self._moments.update(values)
            self._scale = _inverse(self._moments.std())

    def state(self) -> dict[str, float]:
        """What a checkpoint needs."""
        return self._moments.state() if self._whitening == "running" else {}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Stand where `state` was taken."""
        self._moments.load_state(state)


def _inverse(std: float) -> float:
    """1 / std; 1 where there is no deviation to divide by."""
    return 1.0 if math.isnan(std) or std < EPS else 1.0 / std
