"""A reward for writing the answer in the form that was asked for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from pydantic import Field, model_validator

from posttrain.core.contracts import PluginConfig, RegularExpression, Reward
from posttrain.core.types import RewardSample, Score

THINK_THEN_ANSWER = r"<think>.*?</think>\s*<answer>.*?</answer>"


class FormatConfig(PluginConfig):
    """Settings of `format`. How much it counts is the reward's `weight` in the stage."""

    pattern: RegularExpression | None = Field(
        default=None,
        description="Python regular expression; . matches line ends too; null without tags: "
        + THINK_THEN_ANSWER,
    )
    tags: tuple[str, ...] | None = Field(
        default=None,
        min_length=1,
        description="instead of a pattern: names of tags, each <name>...</name> once, in this "
        "order, none inside another",
    )
    match: Literal["whole", "anywhere"] = Field(
        default="whole", description="whole: all of the text but white space around it"
    )
    partial_credit: bool = Field(
        default=False,
        description="with tags: the share of the components that hold, not all or none",
    )

    @model_validator(mode="after")
    def _one_form(self) -> FormatConfig:
        if self.tags is not None and self.pattern is not None:
            raise ValueError("give 'pattern' or 'tags', not both: each says what the form is")
        if self.tags is None and self.partial_credit:
            raise ValueError("'partial_credit' needs 'tags': a pattern matches or does not")
        if self.tags is not None and len(set(self.tags)) < len(self.tags):
            raise ValueError("a tag stands twice in 'tags'; each may be there once")
        return self


class FormatReward(Reward[FormatConfig]):
    """R_i = 1[the text matches `pattern`, or has all `tags`], else 0.

    A tag is right when <name> and </name> are there once each and stand after the tags before it;
    each is a component of the score, and so, with `match: whole`, is `nothing else`: all tags are
    right and only white space stands outside them. With `partial_credit` R_i is the share of these
    components that hold. The text is the response without special tokens. Beware of nested
    repetitions in your pattern: they take exponential time on some texts.
    Source: format reward, DeepSeek-R1, arXiv:2501.12948, section 2.2.2.
    """

    name = "format"
    Config = FormatConfig

    def score(self, samples: Sequence[RewardSample]) -> list[Score]:
        """Scores in [0, 1], in order."""
        if self.config.tags is not None:
            return [self._by_tags(sample.text, self.config.tags) for sample in samples]
        pattern = re.compile(self.config.pattern or THINK_THEN_ANSWER, re.DOTALL)
        test = pattern.fullmatch if self.config.match == "whole" else pattern.search
        return [Score(float(test(sample.text.strip()) is not None)) for sample in samples]

    def _by_tags(self, text: str, tags: Sequence[str]) -> Score:
        right: dict[str, float] = {}
        reached, outside = 0, ""
        for tag in tags:
            begin, end = f"<{tag}>", f"</{tag}>"
            opened, closed = text.find(begin), text.find(end)
            once = text.count(begin) == text.count(end) == 1
            right[tag] = float(once and reached <= opened < closed)
            if right[tag]:
                outside, reached = outside + text[reached:opened], closed + len(end)
        if self.config.match == "whole":
            alone = not (outside + text[reached:]).strip()
            right["nothing else"] = float(alone and all(right.values()))
        wrong = ", ".join(name for name, ok in right.items() if not ok)
        share = sum(right.values()) / len(right)
        value = share if self.config.partial_credit else float(not wrong)
        return Score(value, detail=f"not in form: {wrong}" if wrong else "", components=right)
