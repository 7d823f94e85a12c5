"""Reward from a learned model: a scalar head read at the last token (arXiv:2203.02155, 3.5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import Field

from posttrain.core.contracts import PluginConfig, Reward, RewardContext
from posttrain.core.data.tokens import response_batch
from posttrain.core.types import RewardSample, Score

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class RewardModelConfig(PluginConfig):
    """Settings of `reward_model`."""

    transform: Literal["sigmoid", "none"] = Field(
        default="sigmoid", description="sigmoid: into (0, 1), next to a 0/1 reward; none: raw logit"
    )


class RewardModelReward(Reward[RewardModelConfig]):
    """R = sigmoid(RM(x, y)), or the raw RM(x, y) with `transform: none`.

    Reads the stage's input `reward_model`. One value per sample; never unscored. Of an episode y is
    all of it up to the last sampled token, with what the environment wrote.
    Source: InstructGPT, arXiv:2203.02155, section 3.5.
    """

    name = "reward_model"
    Config = RewardModelConfig
    runs_in = "host"
    needs_inputs = frozenset({"reward_model"})

    def setup(self, context: RewardContext) -> None:
        """Load the stage's reward model."""
        # Late, here and in `score`: transformers takes seconds that only runs should pay.
        from posttrain.core.models.device import ModelRuntime
        from posttrain.core.models.loading import load_reward_model

        runtime = ModelRuntime(context.device, context.dtype, context.attention)
        self.model: PreTrainedModel = load_reward_model(
            context.inputs["reward_model"], runtime, new_head=False
        )
        self.batch_size = context.batch_size

    @torch.no_grad()
    def score(self, samples: Sequence[RewardSample]) -> list[Score]:
        """Scores of whole sequences, in batches; a prompt shared by a batch is computed once."""
        from posttrain.core.training.reward_model import score_batch_rows

        groups: dict[tuple[int, ...], int] = {}
        values: list[float] = []
        for start in range(0, len(samples), self.batch_size):
            part = samples[start : start + self.batch_size]
            batch = response_batch(
                prompts=[s.prompt_ids for s in part],
                responses=[s.token_ids or s.response_ids for s in part],
                group_ids=[groups.setdefault(s.prompt_ids, len(groups)) for s in part],
                pad_token_id=0,  # masked everywhere, so any id will do
                problems=[s.problem for s in part],
            )
            logits = score_batch_rows(self.model, batch)
            shaped = logits.sigmoid() if self.config.transform == "sigmoid" else logits
            values += shaped.tolist()
        return [Score(value) for value in values]
