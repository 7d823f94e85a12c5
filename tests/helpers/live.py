"""A live environment of digits, with faults that are planted by the problem's key."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from dataclasses import dataclass, field
from typing import ClassVar

from posttrain.core.contracts import (
    LiveEnvironment,
    Observation,
    Opening,
    PluginConfig,
    Turn,
)
from posttrain.core.types import Message, Problem

TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['content'] + ('<|im_end|>' if message['role'] == 'assistant' else '|') }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
)
CHARACTERS = "|0123"


class DigitGameConfig(PluginConfig):
    """Settings of `digit_game`."""

    turns: int = 3


@dataclass
class Game:
    """The digits that are asked for, one a turn."""

    problem: str
    digits: list[int]
    at: int = 0
    closed: bool = False


@dataclass
class Seen:
    """What the environment was asked, for tests."""

    open: int = 0
    most_open: int = 0
    closed: int = 0
    started: int = 0
    stopped: int = 0
    seeds: dict[str, set[int]] = field(default_factory=dict)


class DigitGame(LiveEnvironment[DigitGameConfig]):
    """Each turn shows a digit; saying it first gives 1 / turns. Source: own."""

    name = "digit_game"
    Config = DigitGameConfig
    deterministic = True
    at_once: ClassVar[int] = 2048

    def __init__(self, config: DigitGameConfig) -> None:
        super().__init__(config)
        self.seen = Seen()

    async def start(self) -> None:
        self.seen.started += 1

    async def stop(self) -> None:
        self.seen.stopped += 1

    async def reset(self, problem: Problem, seed: int) -> Opening:
        self.seen.seeds.setdefault(problem.key, set()).add(seed)
        if problem.key.startswith("crash at reset"):
            raise OSError("the server is away")
        if problem.key.startswith("hang at reset"):
            await asyncio.sleep(3600)
        self.seen.open += 1
        self.seen.most_open = max(self.seen.most_open, self.seen.open)
        rng = random.Random(problem.key)
        digits = [rng.randrange(4) for _ in range(self.config.turns)]
        return Opening(Game(problem.key, digits), messages=(Message("user", str(digits[0])),))

    async def step(self, state: object, turn: Turn) -> Observation:
        assert isinstance(state, Game) and not state.closed
        if state.problem.startswith("crash"):
            raise ValueError("a bug of the game")
        if state.problem.startswith("hang"):
            await asyncio.sleep(3600)
        while state.problem.startswith("deaf"):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)
        if state.problem.startswith("cancel"):
            raise asyncio.CancelledError
        if state.problem.startswith("block"):
            time.sleep(4)  # noqa: ASYNC251 - that is the fault
        await asyncio.sleep(random.random() * 0.01)  # whatever comes first changes nothing
        right = turn.text[:1] == str(state.digits[state.at])
        state.at += 1
        done = state.at == len(state.digits)
        shown = () if done else (Message("user", str(state.digits[state.at])),)
        share = 1 / len(state.digits)
        return Observation("", done, state, {"asked": 1.0}, shown, reward=share * right)

    async def close(self, state: object) -> None:
        assert isinstance(state, Game) and not state.closed, "closed once"
        if state.problem.startswith("hang"):
            await asyncio.sleep(0.2)  # a stop that comes meanwhile must not end this
        state.closed = True
        self.seen.open -= 1
        self.seen.closed += 1


class Whims(DigitGame):
    """As `DigitGame`, and asks for other digits each time; one in eight episodes breaks."""

    name = "whims"
    deterministic = False

    async def reset(self, problem: Problem, seed: int) -> Opening:
        opening = await super().reset(problem, seed)
        assert isinstance(opening.state, Game)
        rng = random.SystemRandom()
        opening.state.digits = [rng.randrange(4) for _ in opening.state.digits]
        if rng.random() < 0.125:
            opening.state.problem = "crash"
        shown = (Message("user", str(opening.state.digits[0])),)
        return Opening(opening.state, messages=shown)
