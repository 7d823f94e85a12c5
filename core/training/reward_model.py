"""Reward model: scores of whole responses, and one step on pairs of answers.

B rows of a batch, or pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import PairLoss, PairScores
from posttrain.core.data.preference import Pair
from posttrain.core.data.tokens import response_batch
from posttrain.core.models.sharded import put_away
from posttrain.core.training.finite import note_suspects
from posttrain.core.training.forward import response_states
from posttrain.core.training.metrics import MetricSums
from posttrain.core.training.optim import MasterOptimizer
from posttrain.core.training.ranks import ALONE, Ranks, add_gradients
from posttrain.core.training.readings import StepReadings
from posttrain.core.training.splitting import micro_size


def score_batch_rows(model: PreTrainedModel, batch: RolloutBatch) -> Tensor:
    """Rewards [B] of a batch's rows, float32; the prompt of a group is computed once."""
    hidden, _, mask, _ = response_states(model, batch, include_last=True)
    columns = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    last = (columns * mask).amax(dim=1) if mask.shape[1] else mask.sum(dim=1)
    rows = torch.arange(len(batch), device=hidden.device)
    scores: Tensor = model.get_submodule("score")(hidden[rows, last])
    return scores.squeeze(-1).float()


def score_pairs(model: PreTrainedModel, pairs: Sequence[Pair]) -> PairScores:
    """Rewards [B] of the pairs' answers, whose prompt is computed once, with their own margins.

    An answer's reward is read at its end, which is that of its last turn.
    """
    scores = score_batch_rows(model, pair_batch(pairs))
    margin = torch.tensor([pair.margin for pair in pairs]).to(scores)
    return PairScores.of_rewards(scores[0::2], scores[1::2], margin)


def pair_batch(pairs: Sequence[Pair]) -> RolloutBatch:
    """The pairs' answers, chosen and rejected in turn."""
    answers = [answer for pair in pairs for answer in (pair.chosen_ids, pair.rejected_ids)]
    return response_batch(
        prompts=[pair.prompt_ids for pair in pairs for _ in range(2)],
        responses=answers,
        group_ids=[row // 2 for row in range(len(answers))],
        pad_token_id=0,
        problems=(),
    )


def reward_loss(loss: PairLoss[Any], scores: PairScores, sums: MetricSums) -> Tensor:
    """These pairs' share of the mini-batch's mean loss; adds what they measure to `sums`."""
    share = loss.pair_loss(scores).sum() / scores.num_pairs
    chosen, rejected = scores.chosen.detach(), scores.rejected.detach()
    everywhere = torch.ones_like(chosen, dtype=torch.bool)
    both, twice = torch.cat([chosen, rejected]), torch.cat([everywhere, everywhere])
    sums.add_scalar("loss/preference", share.detach())
    sums.add("rm/pair_accuracy", (chosen > rejected).double(), everywhere)
    sums.add("rm/margin", chosen - rejected, everywhere)
    sums.add("rm/reward_mean", both, twice)
    sums.add_extremes("rm/reward", both, twice)
    return share


def reward_step(
    model: PreTrainedModel,
    optimizer: MasterOptimizer,
    pairs: Sequence[Pair],
    loss: PairLoss[Any],
    *,
    micro_batch_size: int,
    check: Callable[[], None] = lambda: None,
    ranks: Ranks = ALONE,
    readings: StepReadings | None = None,
) -> dict[str, float]:
    """One optimizer step on the mean loss over `pairs`, however it is split."""
    sums = MetricSums()
    if readings is not None:
        margin = torch.tensor([pair.margin for pair in pairs], dtype=torch.float64)
        batch = pair_batch(pairs)
        ends = batch.mask.cumsum(dim=1).argmax(dim=1)
        scored = torch.zeros_like(batch.mask).scatter_(1, ends[:, None], 1)
        readings.begin(batch, ["scores"], {"margin": margin, "scored": scored})
    size = micro_size(len(pairs), micro_batch_size, ranks.size)
    for start, counts in ranks.share(range(0, len(pairs), size)):
        check()
        scores = score_pairs(model, pairs[start : start + size])
        own = sums if counts else MetricSums()
        share = reward_loss(loss, replace(scores, num_pairs=float(len(pairs))), own)
        if readings is not None and counts:
            both = torch.stack([scores.chosen, scores.rejected], dim=1).flatten().detach().cpu()
            index = torch.arange(2 * start, 2 * start + len(both))
            readings.put(index, scores=both[:, None] * readings.given["scored"][index])
        rows = range(start, min(start + size, len(pairs)))
        note_suspects(own, share, rows, scores.chosen, scores.rejected)
        add_gradients(share, counts)
    if readings is not None:
        readings.merge(ranks)
    sums = ranks.merge(sums)
    total = sums.mean("loss/preference", default=0.0)
    report = optimizer.step(loss=total, rows=sums.suspects or range(len(pairs)))
    return sums.result() | report.metrics()


@torch.no_grad()
def pairs_in_order(
    model: PreTrainedModel,
    pairs: Sequence[Pair],
    batch_size: int,
    check: Callable[[], None] = lambda: None,
    ranks: Ranks = ALONE,
) -> list[bool]:
    """Of each pair, whether the chosen answer has the higher score."""
    right = torch.zeros(len(pairs))
    for start, counts in ranks.share(range(0, len(pairs), batch_size)):
        check()
        scores = score_pairs(model, pairs[start : start + batch_size])
        if counts:
            right[start : start + len(scores.chosen)] = (
                (scores.chosen > scores.rejected).cpu().float()
            )
    put_away(model)
    return [one > 0 for one in ranks.add(right).tolist()]
