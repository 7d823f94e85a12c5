"""ARPO's rule: the answer's score, a bonus for using every tool, -1 for a broken form."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pydantic import Field

from posttrain.core.contracts import PluginConfig, RegularExpression, Reward
from posttrain.core.types import RewardSample, Score


class ArpoRuleConfig(PluginConfig):
    """Settings of `arpo_rule`."""

    form: RegularExpression = Field(
        default=r".*<answer>.*</answer>\s*",
        description="Python regular expression that all of the response must match, tool results "
        "included; . matches line ends too",
    )
    calls: tuple[str, ...] = Field(
        default=("</search>", "</python>"),
        description="texts that must all occur for the bonus: the closing tags of the tools",
    )
    bonus: float = Field(default=0.1, ge=0, description="for a response with all `calls`")
    broken: float = Field(default=-1.0, description="for a response that is not in the form")


class ArpoRuleReward(Reward[ArpoRuleConfig]):
    """R_i = -1 if the form is broken; 0 if the verdict is 0; else verdict + 0.1 [all tools called].

    The verdict is the task's, in [0, 1] (the paper: F1 of the answer). The form and the calls are
    looked for in the whole response, the verdict is on its last turn.
    Source: ARPO, arXiv:2507.19849, section 3.3, and its released code.
    """

    name = "arpo_rule"
    Config = ArpoRuleConfig
    needs_answer = True

    def score(self, samples: Sequence[RewardSample]) -> list[Score]:
        """One score per sample, in order; never unscored."""
        return [self._score(sample) for sample in samples]

    def _score(self, sample: RewardSample) -> Score:
        text = sample.transcript or sample.text
        if re.fullmatch(self.config.form, text, re.DOTALL) is None:
            return Score(self.config.broken, detail="not in the form")
        verdict = sample.verdict.correct
        if verdict == 0:
            return Score(0.0, detail="wrong answer")
        bonus = self.config.bonus * all(call in text for call in self.config.calls)
        return Score(verdict + bonus, components={"verdict": verdict, "bonus": bonus})
