"""A reward for writing the answer in the form that was asked for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from pydantic import Field, field_validator

from posttrain.core.contracts import PluginConfig, Reward
from posttrain.core.hooks import hookimpl
from posttrain.core.types import RewardSample, Score


class FormatConfig(PluginConfig):
    """Settings of `format`. How much it counts is the reward's `weight` in the stage."""

    pattern: str = Field(
        default=r"<think>.*?</think>\s*<answer>.*?</answer>",
        description="Python regular expression; . matches line ends too",
    )
    match: Literal["whole", "anywhere"] = Field(
        default="whole", description="whole: all of the text but white space around it"
    )

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, value: str) -> str:
        try:
            re.compile(value, re.DOTALL)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from error
        return value


class FormatReward(Reward[FormatConfig]):
    """R_i = 1[the text matches `pattern`], else 0.

    The text is the response without special tokens. Beware of nested repetitions in your pattern:
    they take exponential time on some texts.
    Source: format reward, DeepSeek-R1, arXiv:2501.12948, section 2.2.2.
    """

    name = "format"
    Config = FormatConfig

    def score(self, samples: Sequence[RewardSample]) -> list[Score]:
        """1.0 or 0.0 per sample, in order."""
        pattern = re.compile(self.config.pattern, re.DOTALL)
        test = pattern.fullmatch if self.config.match == "whole" else pattern.search
        return [Score(float(test(sample.text.strip()) is not None)) for sample in samples]


@hookimpl
def posttrain_register() -> list[type[FormatReward]]:
    """Offer this plugin."""
    return [FormatReward]
