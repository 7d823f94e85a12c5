"""Prompts in the order a stage consumes them, with a cursor that a checkpoint can keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from posttrain.core.contracts import PromptGroup
from posttrain.core.runtime.seeding import generator
from posttrain.core.types import Problem


class PromptEncoder(Protocol):
    """A `ChatTokenizer`, or an `EpisodeRunner`, whose prompts describe the environment."""

    def encode_prompt(self, problem: Problem) -> tuple[int, ...]:
        """Token ids of the prompt."""
        ...


class PromptStream:
    """An endless stream of prompts: all of them in order, then again and again in other orders."""

    def __init__(self, prompts: Sequence[PromptGroup], seed: int) -> None:
        self.prompts, self.seed = prompts, seed
        self.position = 0
        self._order: tuple[int, list[int]] = (0, list(range(len(prompts))))

    def take(self, count: int) -> list[PromptGroup]:
        return [self.prompts[index] for index in self.take_indices(count)]

    def at(self, position: int) -> PromptGroup:
        """The prompt at a place of the stream, from 0."""
        return self.prompts[self._index(position)]

    def take_indices(self, count: int) -> list[int]:
        """As `take`, but the prompts' places among those that there are."""
        self.position += count
        return [self._index(at) for at in range(self.position - count, self.position)]

    def _index(self, position: int) -> int:
        epoch, index = divmod(position, len(self.prompts))
        if epoch != self._order[0]:
            draw = generator(self.seed, "prompts", epoch)
            order = torch.randperm(len(self.prompts), generator=draw).tolist()
            self._order = (epoch, order)
        return self._order[1][index]
