"""Problems of which an environment makes an episode: each is a seed and the same instructions."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from functools import lru_cache

from pydantic import Field

from posttrain.core.contracts import PluginConfig, Task
from posttrain.core.math.splits import split_of, too_few
from posttrain.core.rollout.external import SEED
from posttrain.core.types import Problem, Split, Verdict


class EpisodesConfig(PluginConfig):
    """Settings of `episodes`."""

    prompt: str = Field(
        default="Play.",
        min_length=1,
        description="what the model reads before the environment's own words",
    )
    count: int = Field(
        default=100_000, ge=2, le=10_000_000, description="seeds 0 to count - 1; different episodes"
    )
    held_out_permille: int = Field(
        default=100, ge=1, le=999, description="of 1000 seeds, how many are never trained on"
    )


class EpisodesTask(Task[EpisodesConfig]):
    """Problem n is episode n of the stage's environment, which also judges it.

    correct = the environment's outcome, within [0, 1].
    Source: own; for environments that bring their own questions, such as games.
    """

    name = "episodes"
    Config = EpisodesConfig
    by_environment = True

    def problems(self, split: Split, count: int, seed: int) -> list[Problem]:
        """`count` distinct problems of `split` in an order decided by `seed`."""
        seeds = self._seeds(split)
        if len(seeds) < count:
            raise too_few(self.name, split, count, len(seeds), "raise task.count")
        chosen = random.Random(f"episodes|{split}|{seed}").sample(seeds, count)
        return [
            Problem(f"episode {number}", self.config.prompt, "", "", {SEED: str(number)})
            for number in chosen
        ]

    def available(self, split: Split) -> int | None:
        """Every seed that belongs to `split`."""
        return len(self._seeds(split))

    def verify(self, problem: Problem, text: str) -> Verdict:
        """Nothing is right without its environment."""
        return Verdict(0.0, None)

    def source(self) -> str:
        return "seeds of the stage's environment"

    def _seeds(self, split: Split) -> Sequence[int]:
        return seeds_of(split, self.config.count, self.config.held_out_permille)


@lru_cache(maxsize=4)  # 0.1 s for 100,000
def seeds_of(split: Split, count: int, held_out_permille: int) -> Sequence[int]:
    """The numbers below `count` that belong to `split`."""
    return array("I", (n for n in range(count) if split_of(str(n), held_out_permille) == split))
