"""Rewards of a rollout batch: components, weighted sum, and their place on the tokens.

Axes: B rows, T response tokens, K reward components.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import KlEstimator, Reward, Task
from posttrain.core.errors import RunError
from posttrain.core.types import RewardSample, Score


@dataclass(frozen=True, slots=True)
class WeightedReward:
    """A reward plugin and its factor in the sum."""

    reward: Reward[Any]
    weight: float


def reward_samples(batch: RolloutBatch, task: Task[Any]) -> tuple[RewardSample, ...]:
    """What rewards see of each row, the task's verdict included."""
    samples = []
    for row, (problem, text) in enumerate(zip(batch.problems, batch.texts, strict=True)):
        prompt = batch.prompt_ids[row][batch.prompt_mask[row].bool()]
        response = batch.response_ids[row][batch.response_mask[row].bool()]
        samples.append(
            RewardSample(
                problem=problem,
                prompt_ids=tuple(prompt.tolist()),
                response_ids=tuple(response.tolist()),
                text=text,
                truncated=bool(batch.truncated[row]),
                verdict=task.verify(problem, text),
            )
        )
    return tuple(samples)


def score_batch(
    batch: RolloutBatch, task: Task[Any], rewards: Sequence[WeightedReward]
) -> RolloutBatch:
    """Fill `reward_components`, `rewards`, `scored`, `acc`, `token_rewards`, and narrow `mask`.

    The reward is the weighted sum of the components that could be scored. A row that none could
    score, or whose sum is not finite, is unscored: its reward is 0, its mask empty, and it takes no
    part in group statistics. The reward sits on the last sampled token.
    """
    samples = reward_samples(batch, task)
    columns = [_component(weighted.reward, samples) for weighted in rewards]
    components = torch.stack(columns, dim=1)
    weights = torch.tensor([weighted.weight for weighted in rewards], dtype=components.dtype)
    total = (components.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf) * weights).sum(dim=1)
    scored = torch.isfinite(total) & ~components.isnan().all(dim=1)
    total = torch.where(scored, total, torch.zeros_like(total)).float()
    filled = batch.with_columns(
        reward_components=components,
        rewards=total,
        scored=scored,
        acc=torch.tensor([s.verdict.correct for s in samples]),
        mask=batch.mask * scored[:, None].to(batch.mask.dtype),
        token_rewards=place_on_last_token(total, batch.response_mask),
    )
    return replace(filled, samples=samples)


def _component(reward: Reward[Any], samples: Sequence[RewardSample]) -> Tensor:
    scores: list[Score] = reward.score(samples)
    if len(scores) != len(samples):
        raise RunError(
            f"reward '{reward.name}' returned {len(scores)} scores for {len(samples)} samples: it "
            "must return one Score per sample, in order"
        )
    values = [math.nan if s.value is None else float(s.value) for s in scores]
    return torch.tensor(values, dtype=torch.float64)


def place_on_last_token(rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Dense rewards [B, T] with `rewards` [B] at the last position where the mask is 1.

    A row without any sampled token keeps its reward at no position.
    """
    width = response_mask.shape[1]
    index = torch.arange(1, width + 1) * response_mask
    last = index.amax(dim=1, keepdim=True)
    here = (index == last) & (last > 0)
    return torch.where(here, rewards[:, None], torch.zeros(()))


def subtract_kl(batch: RolloutBatch, estimator: KlEstimator[Any], coef: float) -> RolloutBatch:
    """KL in the reward: token_rewards - coef * kl(old_logprobs, ref_logprobs) on sampled tokens."""
    kl = estimator.kl(batch.column("old_logprobs"), batch.column("ref_logprobs")).detach()
    dense = batch.column("token_rewards")
    return batch.with_columns(
        token_rewards=torch.where(batch.response_mask.bool(), dense - coef * kl, dense)
    )


def rollout_metrics(batch: RolloutBatch, names: Sequence[str]) -> dict[str, float]:
    """Rewards, accuracy, groups and lengths of a scored batch; unscored rows are counted apart."""
    scored = batch.column("scored").bool()
    rewards = batch.column("rewards")[scored].double()
    acc, components = batch.column("acc"), batch.column("reward_components")
    lengths = batch.response_mask.sum(dim=1).double()
    metrics = {
        "reward/unscored_frac": 1.0 - float(scored.double().mean()),
        "acc/mean": float(acc.double().mean()),
        "resp_len/mean": float(lengths.mean()),
        "resp_len/min": float(lengths.min()),
        "resp_len/max": float(lengths.max()),
        "resp_len/truncated_frac": float(batch.truncated.double().mean()),
        "tokens/response": float(lengths.sum()),
    }
    if rewards.numel():
        metrics |= {
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std(correction=0)),
            "reward/min": float(rewards.min()),
            "reward/max": float(rewards.max()),
        }
    for k, name in enumerate(names):
        values = components[:, k][~components[:, k].isnan()]
        if values.numel():
            metrics[f"reward/component/{name}"] = float(values.mean())
    return metrics | _group_metrics(batch, acc)


def _group_metrics(batch: RolloutBatch, acc: Tensor) -> dict[str, float]:
    groups = list(batch.groups())
    rewards = batch.column("rewards")
    equal = sum(float(rewards[g].max() - rewards[g].min()) <= 1e-6 for g in groups)
    return {
        "group/zero_adv_frac": equal / len(groups),
        "group/all_correct_frac": sum(bool((acc[g] >= 1).all()) for g in groups) / len(groups),
        "group/all_wrong_frac": sum(bool((acc[g] < 1).all()) for g in groups) / len(groups),
    }


def advantage_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Mean, spread and sign of the advantages over the tokens that take loss."""
    kept = batch.column("advantages")[batch.mask.bool()].double()
    if kept.numel() == 0:
        return {}
    return {
        "adv/mean": float(kept.mean()),
        "adv/std": float(kept.std(correction=0)),
        "adv/max_abs": float(kept.abs().max()),
        "adv/pos_frac": float((kept > 0).double().mean()),
    }
