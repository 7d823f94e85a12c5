"""What a response loses when the length limit cuts it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field, model_validator

from posttrain.core.contracts import PluginConfig, Reward
from posttrain.core.types import RewardSample, Score


class StopProperlyConfig(PluginConfig):
    """Settings of `stop_properly`."""

    mode: Literal["scale", "set", "subtract"] = Field(
        default="scale",
        description="what becomes of the reward of a cut response: times `coef` (NeMo-RL); "
        "`coef` itself (OpenRLHF's negative values); minus `coef`",
    )
    coef: float = Field(default=0.0, description="see `mode`; with scale in [0, 1]")

    @model_validator(mode="after")
    def _coef_fits(self) -> StopProperlyConfig:
        if self.mode == "scale" and not 0 <= self.coef <= 1:
            raise ValueError(f"coef is {self.coef}; with mode 'scale' it is between 0 and 1")
        if self.mode == "subtract" and self.coef < 0:
            raise ValueError(f"coef is {self.coef}; with mode 'subtract' it is not negative")
        return self


class StopProperlyReward(Reward[StopProperlyConfig]):
    """R_i = 0 if response i ended by itself, else what turns its verdict into the wanted reward.

    scale: (coef - 1) correct; set: coef - correct; subtract: -coef. Rewards are summed, so in
    addition to
    `accuracy` of the same weight a cut response gets coef * correct, coef, or correct - coef.
    Sources: NeMo-RL, stop_properly_penalty_coef; OpenRLHF, stop_properly_penalty_coef.
    """

    name = "stop_properly"
    Config = StopProperlyConfig
    needs_answer = True
    runs_in = "host"
    after_clip = True

    def score(self, samples: Sequence[RewardSample]) -> list[Score]:
        """One score per sample, in order; never unscored."""
        return [self._score(sample) for sample in samples]

    def _score(self, sample: RewardSample) -> Score:
        if not sample.truncated:
            return Score(0.0)
        coef, correct = self.config.coef, sample.verdict.correct
        change = {"scale": (coef - 1) * correct, "set": coef - correct, "subtract": -coef}
        return Score(change[self.config.mode] + 0.0, detail="cut by the length limit")
