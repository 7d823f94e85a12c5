"""ReMax's baseline: the reward of the greedy answer to each prompt of a rollout batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import PromptGroup, RolloutEngine, Task
from posttrain.core.data.packing import rollout_batch
from posttrain.core.data.tokenization import ChatTokenizer
from posttrain.core.rewards.pool import RewardPool
from posttrain.core.rollout.episodes import EpisodeRunner
from posttrain.core.rollout.generation import generate_groups
from posttrain.core.scoring import OnMissing, WeightedReward, score_batch
from posttrain.core.types import SamplingParams


def greedy_rewards(
    engine: RolloutEngine[Any],
    tokenizer: ChatTokenizer,
    task: Task[Any],
    rewards: Sequence[WeightedReward],
    batch: RolloutBatch,
    max_tokens: int,
    clip: tuple[float | None, float | None] = (None, None),
    *,
    on_missing: OnMissing = "zero",
    pool: RewardPool | None = None,
    episodes: EpisodeRunner | None = None,
) -> Tensor:
    """Reward [B] of the greedy answer to each row's prompt; NaN where it could not be scored.

    One more generation per prompt, at temperature 0; with `episodes`, a whole episode.
    Source: ReMax, arXiv:2310.10505, section 4.
    """
    groups = list(batch.groups())
    prompts = []
    for rows in groups:
        first = int(rows[0])
        ids = batch.prompt_ids[first][batch.prompt_mask[first].bool()]
        prompts.append(PromptGroup(batch.problems[first], tuple(ids.tolist())))
    params = SamplingParams(num_generations=1, max_tokens=max_tokens, temperature=0.0)
    generate = episodes.generate if episodes else generate_groups
    answered = rollout_batch(generate(engine, prompts, params), tokenizer)
    scored = score_batch(answered, task, rewards, clip=clip, on_missing=on_missing, pool=pool)
    nan = torch.full((), torch.nan)
    values = torch.where(scored.column("scored").bool(), scored.column("rewards"), nan)
    result = torch.zeros(len(batch))
    for rows, value in zip(groups, values, strict=True):
        result[rows] = value
    return result
