"""Counting on: the next number."""

from __future__ import annotations

import random

from pydantic import Field

from posttrain.core.contracts import PluginConfig, Task
from posttrain.core.math.splits import split_of, too_few
from posttrain.core.types import Problem, Split, Verdict


class ExampleConfig(PluginConfig):
    """Settings of `example`."""

    largest: int = Field(default=999, ge=99, le=999_999, description="largest number asked for")


class Example(Task[ExampleConfig]):
    """The prompt is a number, the answer the next one: correct = 1 if it is. Source: an example.

    `split_of` decides by a problem's key which split it belongs to, so that the two never overlap.
    """

    name = "example"
    Config = ExampleConfig

    def problems(self, split: Split, count: int, seed: int) -> list[Problem]:
        """`count` distinct problems of `split`, in an order that `seed` decides."""
        keys = self._keys(split)
        if len(keys) < count:
            raise too_few(self.name, split, count, len(keys), "ask for fewer, or raise largest")
        random.Random(f"{self.name}|{split}|{seed}").shuffle(keys)
        return [self._problem(key) for key in keys[:count]]

    def available(self, split: Split) -> int:
        """All numbers of the split."""
        return len(self._keys(split))

    def verify(self, problem: Problem, text: str) -> Verdict:
        """Whether `text` is the number; any text is judged, and none is an error."""
        return Verdict(float(text.strip() == problem.answer), text.strip() or None)

    def _keys(self, split: Split) -> list[str]:
        every = (str(number) for number in range(self.config.largest + 1))
        return [key for key in every if split_of(key, 100) == split]  # 100 of 1000 are held out

    def _problem(self, key: str) -> Problem:
        answer = str(int(key) + 1)
        return Problem(key=key, prompt=f"{key},", answer=answer, worked=answer)
