"""A penalty that grows over the last tokens before the length limit (DAPO, arXiv:2503.14476)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field, model_validator

from posttrain.core.contracts import PluginConfig, Reward
from posttrain.core.math.shaping import soft_overlong
from posttrain.core.types import RewardSample, Score


class SoftOverlongConfig(PluginConfig):
    """Settings of `soft_overlong`."""

    max_length: int | None = Field(
        default=None,
        ge=1,
        description="L_max, tokens, where the whole penalty is due; null = the stage's "
        "generation.max_response_length (20,480 in the paper, and outside a stage)",
    )
    buffer_length: int | None = Field(
        default=None,
        ge=0,
        description="L_cache, tokens before max_length over which the penalty grows; 0 = a step; "
        "null = a fifth of max_length (4,096 in the paper)",
    )
    factor: float = Field(
        default=1.0, ge=0, description="the penalty at max_length (verl: penalty_factor)"
    )
    floor: float | None = Field(
        default=-1.0,
        le=0,
        description="the least value, before `factor` (TRL: -1); null: the line goes on beyond "
        "max_length (verl, AReaL, NeMo-RL)",
    )

    @model_validator(mode="after")
    def _buffer_fits(self) -> SoftOverlongConfig:
        if self.buffer_length is None or self.max_length is None:
            return self
        if self.buffer_length > self.max_length:
            raise ValueError(
                f"buffer_length ({self.buffer_length}) is longer than max_length "
                f"({self.max_length}); it is the last part of it"
            )
        return self


class SoftOverlongReward(Reward[SoftOverlongConfig]):
    """R_i = factor * max(floor, min(0, (L_max - L_cache - n_i) / L_cache)), n_i tokens sampled.

    0 up to L_max - L_cache, -factor at L_max, a straight line between. It says nothing about
    whether the answer is right: add it to a reward that does. Since responses of one group differ
    in length, it gives a signal to groups that are all right or all wrong; filters of groups look
    at the verdict, not at this.
    Source: DAPO, arXiv:2503.14476, eq. 13.
    """

    name = "soft_overlong"
    Config = SoftOverlongConfig
    runs_in = "host"
    after_clip = True

    def score(self, samples: Sequence[RewardSample]) -> list[Score]:
        """One score per sample, in order; never unscored."""
        config = self.config
        longest = 20480 if config.max_length is None else config.max_length
        penalties = soft_overlong(
            torch.tensor([len(sample.response_ids) for sample in samples]),
            max_length=longest,
            cache=longest // 5 if config.buffer_length is None else config.buffer_length,
            factor=self.config.factor,
            floor=self.config.floor,
        )
        return [Score(penalty) for penalty in penalties.tolist()]
