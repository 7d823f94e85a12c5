"""Whether the response's answer is the reference, character by character."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from pydantic import Field, model_validator

from posttrain.core.contracts import PluginConfig, RegularExpression, Reward
from posttrain.core.types import Problem, RewardSample, Score


class ExactMatchConfig(PluginConfig):
    """Settings of `exact_match`. Without `marker` and `pattern` the whole text is the answer."""

    marker: str | None = Field(
        default=None, min_length=1, description="the answer is what stands after the last of these"
    )
    pattern: RegularExpression | None = Field(
        default=None,
        description="the answer is group 1 (else all) of the last match of this regular expression",
    )
    ignore_case: bool = Field(default=False, description="compare case-folded text")
    white_space: Literal["strip", "collapse", "remove", "keep"] = Field(
        default="strip",
        description="strip: not at the ends; collapse: also one blank for each run of white space; "
        "remove: none anywhere; keep: as written",
    )

    @model_validator(mode="after")
    def _one_way(self) -> ExactMatchConfig:
        if self.marker is not None and self.pattern is not None:
            raise ValueError("give 'marker' or 'pattern', not both: each says where the answer is")
        return self


class ExactMatchReward(Reward[ExactMatchConfig]):
    """R_i = 1[answer in the response = problem.answer], else 0.

    A response without the marker, or that the pattern does not match, is 0 and its `detail` says
    so. `ignore_case` and `white_space` apply to both sides. An empty reference is the data's fault:
    unscored, status `error`. Beware of nested repetitions in your pattern.
    Source: rule-based accuracy reward, DeepSeek-R1, arXiv:2501.12948, section 2.2.2.
    """

    name = "exact_match"
    Config = ExactMatchConfig
    needs_answer = True

    def score(self, samples: Sequence[RewardSample]) -> list[Score]:
        """1.0 or 0.0 per sample, in order; None where there is no reference."""
        return [self._score(sample) for sample in samples]

    def unreadable(self, problem: Problem) -> str:
        """Only an empty reference is."""
        return "" if self._plain(problem.answer) else "the problem has no reference answer"

    def _score(self, sample: RewardSample) -> Score:
        if why := self.unreadable(sample.problem):
            return Score(None, "error", why)
        reference = self._plain(sample.problem.answer)
        answer = self._answer(sample.text)
        if answer is None:
            return Score(0.0, detail="no answer found")
        equal = self._plain(answer) == reference
        return Score(float(equal), detail="" if equal else f"read {answer[:80]!r}")

    def _answer(self, text: str) -> str | None:
        if self.config.marker is not None:
            _, found, tail = text.rpartition(self.config.marker)
            return tail if found else None
        if self.config.pattern is not None:
            match = None
            for match in re.finditer(self.config.pattern, text, re.DOTALL):  # noqa: B007 - the last
                pass
            return None if match is None else match[1 if match.re.groups else 0]
        return text

    def _plain(self, text: str) -> str:
        folded = text.casefold() if self.config.ignore_case else text
        if self.config.white_space == "keep":
            return folded
        joint = {"strip": None, "collapse": " ", "remove": ""}[self.config.white_space]
        return folded.strip() if joint is None else joint.join(folded.split())
