"""A penalty on saying the same n words again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from posttrain.core.contracts import PluginConfig, Reward
from posttrain.core.math.shaping import repetition_penalty
from posttrain.core.types import RewardSample, Score


class RepetitionConfig(PluginConfig):
    """Settings of `repetition`."""

    ngram: int = Field(
        default=3, ge=1, le=10_000, description="n, units in a row that are compared"
    )
    penalty: float = Field(
        default=1.0, ge=0, description="p, what a response that only repeats itself would lose"
    )
    unit: Literal["tokens", "words"] = Field(
        default="tokens",
        description="tokens: ids as sampled; words: the text, in lower case, split at white space",
    )


class RepetitionReward(Reward[RepetitionConfig]):
    """R_i = -p (1 - distinct n-grams / n-grams); 0 for a response shorter than n.

    Sources: arXiv:2502.03373, section 4.4; TRL, `get_repetition_penalty_reward` (token ids).
    """

    name = "repetition"
    Config = RepetitionConfig
    runs_in = "host"

    def score(self, samples: Sequence[RewardSample]) -> list[Score]:
        """One score per sample, in order; never unscored."""
        if self.config.unit == "tokens":
            rows: list[Sequence[int]] = [sample.response_ids for sample in samples]
        else:
            numbers: dict[str, int] = {}
            rows = [
                [numbers.setdefault(word, len(numbers)) for word in sample.text.lower().split()]
                for sample in samples
            ]
        penalties = repetition_penalty(rows, ngram=self.config.ngram, penalty=self.config.penalty)
        return [Score(penalty + 0.0) for penalty in penalties.tolist()]
