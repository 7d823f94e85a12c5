"""The rewards of an RL stage, with the pool that scores some of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from posttrain.core.config.rl_stage import RlStage, reward_labels
from posttrain.core.contracts import Reward, RewardContext
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.rewards.pool import RewardPool
from posttrain.core.rewards.scoring import Scorer, WeightedReward
from posttrain.core.rewards.shaping import RewardShaping
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
    rewards = [context.build(Reward, component) for component in stage.rewards]
    for reward in rewards:
        if reward.runs_in == "host":
            reward.setup(setup)
    labels = reward_labels(stage.rewards)
    return Scorer(
        task=context.task,
        rewards=[
            WeightedReward(reward, component.weight, label, component.only_if)
            for reward, component, label in zip(rewards, stage.rewards, labels, strict=True)
        ],
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
