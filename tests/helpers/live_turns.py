"""Episodes of a live environment, played by scripted turns."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from posttrain.core.contracts import LiveEnvironment, Observation, Turn
from posttrain.core.types import Message, Problem, ToolCall

T = TypeVar("T")
LIMIT_S = 60.0


def problem(seed: int | str = 7) -> Problem:
    return Problem(f"episode {seed}", "Play.", "", "", {"seed": str(seed)})


def said(text: str) -> Turn:
    """A turn that ended with `text`."""
    return Turn(text, True, Message("assistant", text))


def called(name: str, **arguments: Any) -> Turn:  # Any: JSON values
    """A turn that makes one call."""
    call = ToolCall(name, arguments, "call00000")
    return Turn("", True, Message("assistant", tool_calls=(call,)))


async def played(
    environment: LiveEnvironment[Any], turns: Sequence[Turn], of: Problem | None = None
) -> tuple[str, list[Observation]]:
    """What one episode shows first, and what it answers, until it is over or turns run out."""
    opening = await environment.reset(of or problem(), 0)
    state, answers = opening.state, []
    try:
        for turn in turns:
            found = await environment.step(state, turn)
            state = found.state
            answers.append(found)
            if found.done or found.truncated:
                break
    finally:
        await environment.close(state)
    return opening.suffix, answers


def during(
    environment: LiveEnvironment[Any],
    use: Callable[[LiveEnvironment[Any]], Awaitable[T]],
    limit_s: float = LIMIT_S,
) -> T:
    """What `use` gives while the environment is started; it is stopped whatever happens."""

    async def run() -> T:
        try:
            await environment.start()
            return await use(environment)
        finally:
            await environment.stop()

    async def limited() -> T:
        return await asyncio.wait_for(run(), limit_s)

    return asyncio.run(limited())


def texts(answers: Sequence[Observation]) -> list[str]:
    return ["\n".join(m.content for m in answer.messages) for answer in answers]
