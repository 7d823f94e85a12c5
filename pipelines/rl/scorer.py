"""The rewards of an RL stage, with the pool that scores some of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from posttrain.core.config.rl_stage import RlStage
from posttrain.core.contracts import Reward, RewardContext
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.rewards.pool import RewardPool
from posttrain.core.rewards.scoring import Scorer
from posttrain.core.rewards.shaping import RewardShaping
from posttrain.core.rewards.weighted import weighted_rewards
from posttrain.pipelines.stage.inputs import StageInputs


def build_scorer(context: StageInputs, stage: RlStage, tokenizer: ChatTokenizer) -> Scorer:
    """The rewards with their weights, shaping and, if they need one, their pool."""
    setup = RewardContext(
        inputs={role: artifact.path for role, artifact in context.inputs.items()},
        dtype=context.runtime.dtype,
        device=context.runtime.device,
        attention=context.runtime.attention,
        batch_size=stage.micro_batch_size,
    )
    weighted = weighted_rewards(stage.rewards, partial(context.build, Reward))
    rewards = [each.reward for each in weighted]
    for reward in rewards:
        if reward.runs_in == "host":
            reward.setup(setup)
    return Scorer(
        task=context.task,
        rewards=weighted,
        tokenizer=tokenizer,
        clip=stage.reward_clip,
        on_missing=stage.on_missing,
        max_failure_rate=stage.reward_pool.max_failure_rate,
        pool=_pool(context, stage, [r for r in rewards if r.runs_in == "worker"], setup),
        shaping=RewardShaping(
            stage.overlong_filter, stage.reward_whiten, keep_mean=stage.reward_keep_mean
        ),
    )


def _pool(
    context: StageInputs, stage: RlStage, rewards: Sequence[Reward[Any]], setup: RewardContext
) -> RewardPool | None:
    """A pool for the rewards that run in worker processes; None when there are none."""
    if not rewards:
        return None
    return RewardPool(
        rewards,
        workers=stage.reward_pool.workers,
        timeout_s=stage.reward_pool.timeout_s,
        context=setup,
        check=context.check,
    )
