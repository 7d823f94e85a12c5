"""From scores to token rewards: overlong filtering, whitening, the place on tokens, steps, KL.

The column `rewards` keeps the summed and clipped reward, for metrics and group filters; advantage
estimators read `token_rewards`. Axes: B rows, T response tokens, S steps of a response.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import KlEstimator
from posttrain.core.data.steps import ending_token, last_turn
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.math.masking import masked, row_sums
from posttrain.core.math.shaping import RunningMoments
from posttrain.core.types import Score

OverlongFilter = Literal["none", "mask", "exclude"]
Whitening = Literal["none", "batch", "running"]
EPS = 1e-8


def place_on_last_token(rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Dense rewards [B, T] with `rewards` [B] at the last position where the mask is 1.

    A row without any sampled token keeps its reward at no position.
    """
    width = response_mask.shape[1]
    index = torch.arange(1, width + 1) * response_mask
    last = index.amax(dim=1, keepdim=True)
    here = (index == last) & (last > 0)
    return torch.where(here, rewards[:, None], torch.zeros(()))


def filter_overlong(
    batch: RolloutBatch, rule: OverlongFilter
) -> tuple[RolloutBatch, dict[str, float]]:
    """`batch` without loss on responses that the length limit cut, and the share of these.

    `mask` empties their mask and leaves their reward in the statistics of their group; `exclude`
    takes them out of these too. An episode of several branches is cut where its last call was,
    which is in the first row, and then all of it is left out.
    Source: DAPO, arXiv:2503.14476, section 3.4 (overlong filtering).
    """
    if rule == "none":
        return batch, {}
    kept, leads, firsts = ~batch.truncated.bool(), batch.leads(), batch.first_branches()
    if firsts is not None:
        kept = kept[firsts]
    mask = masked(batch.mask, kept[:, None].expand(batch.mask.shape))
    filtered = batch.with_columns(mask=mask)
    if rule == "exclude":
        filtered = filtered.with_columns(scored=batch.column("scored").bool() & kept)
    return filtered, {"reward/overlong_filtered_frac": 1.0 - float(kept[leads].double().mean())}


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
        # An episode counts once, however many branches it has.
        self._measure(rewards[scored & batch.leads()].double())
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


def subtract_kl(batch: RolloutBatch, estimator: KlEstimator[Any], coef: float) -> RolloutBatch:
    """KL in the reward: token_rewards - coef * kl(old_logprobs, ref_logprobs) on sampled tokens."""
    kl = estimator.kl(batch.column("old_logprobs"), batch.column("ref_logprobs")).detach()
    dense = batch.column("token_rewards")
    return batch.with_columns(
        token_rewards=torch.where(batch.response_mask.bool(), dense - coef * kl, dense)
    )


def kl_of_batch(batch: RolloutBatch, estimator: KlEstimator[Any]) -> dict[str, float]:
    """`kl/ref_token` and `kl/ref_sequence` of the old policy's log-probs, nats.

    Per token: mean over rows of a row's own mean (an empty row counts as 0). Per sequence: mean
    over rows of a row's sum (Ziegler et al., arXiv:1909.08593, section 2.2).
    """
    mask = batch.response_mask
    kl = estimator.kl(
        masked(batch.column("old_logprobs"), mask), masked(batch.column("ref_logprobs"), mask)
    )
    sums = row_sums(kl.detach(), mask)
    lengths = mask.double().sum(dim=1).clamp(min=1)
    return {
        "kl/ref_token": float((sums / lengths).mean()),
        "kl/ref_sequence": float(sums.mean()),
    }


def fill_steps(
    batch: RolloutBatch, scores: Sequence[Score], tokenizer: ChatTokenizer
) -> RolloutBatch:
    """`batch` with `step_end` [B, S] (-1 = none) and `step_score` [B, S] (0 = none).

    A step ends at the first sampled token after which the decoded text reaches the step's last
    character. Of a response of several turns the text, and so the steps, are those of the last. A
    step whose last token an earlier branch of the episode has is not one of this row.
    """
    num_steps = max([1, *(len(score.steps) for score in scores)])
    ends = torch.full((len(batch), num_steps), -1, dtype=torch.int64)
    values = torch.zeros(len(batch), num_steps)
    for row, score in enumerate(scores):
        if not score.steps:
            continue
        turn = _last_turn(batch, row, tokenizer)
        ids = batch.response_ids[row, turn.start : turn.stop].tolist()
        for index, step in enumerate(score.steps):
            found = ending_token(ids, step.end, tokenizer)
            if found is not None and batch.response_mask[row, turn.start + found]:
                ends[row, index], values[row, index] = turn.start + found, step.correct
    return batch.with_columns(step_end=ends, step_score=values)


def _last_turn(batch: RolloutBatch, row: int, tokenizer: ChatTokenizer) -> range:
    """The columns of the last turn, those included whose tokens an earlier branch has."""
    own = batch.response_mask[row].nonzero().squeeze(1).tolist()
    if not own:
        return range(0)
    start = max([own[0], *(b for a, b in pairwise(own) if b > a + 1)])
    observed = batch.obs_mask is not None and start > 0 and bool(batch.obs_mask[row, start - 1])
    if batch.episode_id is None or start == 0 or observed:
        return range(start, own[-1] + 1)
    # The tokens before are another branch's: the policy's own in this turn, or not.
    ids = batch.response_ids[row, : own[-1] + 1].tolist()
    found = last_turn(ids, batch.texts[row], tokenizer)
    return range(0) if found is None else range(found, len(ids))
