"""Saying a digit of the prompt: the smallest task that a random model can learn."""

from __future__ import annotations

import random

from pydantic import Field

from posttrain.core.contracts import PluginConfig, Task
from posttrain.core.math.splits import split_of, too_few
from posttrain.core.types import Problem, Split, StepVerdict, Verdict


class DigitsConfig(PluginConfig):
    """Settings of `digits`."""

    places: int = Field(
        default=3, ge=1, le=6, description="digits in the prompt; the last one is to be said"
    )
    repeats: int = Field(default=2, ge=1, le=16, description="how often it is to be said")
    held_out_permille: int = Field(
        default=100, ge=1, le=999, description="of 1000 prompts, how many are never trained on"
    )


class DigitsTask(Task[DigitsConfig]):
    """The prompt is a number, the answer its last digit, repeated: correct = share of right places.

    "47" is answered "77". A response is read place by place, so one right digit of two scores 0.5,
    and each place is a step.
    Source: own; a copying task, as in Neural Turing Machines, arXiv:1410.5401, section 4.1.
    """

    name = "digits"
    Config = DigitsConfig

    def problems(self, split: Split, count: int, seed: int) -> list[Problem]:
        """`count` distinct problems of `split` in an order decided by `seed`."""
        keys = self._keys(split)
        if len(keys) < count:
            fix = "ask for fewer, or raise task.places"
            raise too_few(self.name, split, count, len(keys), fix)
        random.Random(f"digits|{split}|{seed}").shuffle(keys)
        return [self._problem(key) for key in keys[:count]]

    def available(self, split: Split) -> int | None:
        """Every number of that many places that belongs to `split`."""
        return len(self._keys(split))

    def verify(self, problem: Problem, text: str) -> Verdict:
        """The share of places with the right digit; a place too many is a wrong one."""
        steps = self.verify_steps(problem, text)
        places = max(len(problem.answer), len(text))
        return Verdict(sum(step.correct for step in steps) / places, text or None)

    def verify_steps(self, problem: Problem, text: str) -> tuple[StepVerdict, ...]:
        """One verdict for each place that `text` has a character for."""
        pairs = enumerate(zip(text, problem.answer, strict=False))
        return tuple(StepVerdict(index + 1, float(got == want)) for index, (got, want) in pairs)

    def _problem(self, key: str) -> Problem:
        answer = key[-1] * self.config.repeats
        return Problem(key, key, answer, answer)

    def _keys(self, split: Split) -> list[str]:
        every = (f"{n:0{self.config.places}d}" for n in range(10**self.config.places))
        return [key for key in every if split_of(key, self.config.held_out_permille) == split]
