"""Scripted turns for environments: what `posttrain env check` plays."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

from posttrain.core.contracts import (
    AnyEnvironment,
    Environment,
    LiveEnvironment,
    NoConfig,
    Observation,
    Opening,
    PromptGroup,
    Task,
    Turn,
)
from posttrain.core.contracts.rollout import Episode
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.kit.checks import Broken, expect
from posttrain.core.kit.environments import expect_sound
from posttrain.core.rollout.event_loop import Deaf, within
from posttrain.core.rollout.turns import Turns, score_of
from posttrain.core.types import Message, Problem, ToolCall, ToolSchema

T = TypeVar("T")
Json = Mapping[str, Any]  # Any: JSON values
WORD = re.compile(r"[\w+-]+(?:\.\w+)*")
CALL = re.compile(r"\S*\.\.\.\S+")
"""How instructions write a call, with dots for its argument."""
SCORE_S = 600.0
"""Seconds of a score or of a solution, which may run programs."""
PROBLEMS = tuple(
    Problem(f"episode {n}", f"What is {n} + 140?", str(n + 140), "", {"seed": str(n)})
    for n in range(3)
)


@dataclass(frozen=True, kw_only=True)
class EnvironmentSubject:
    """An environment that is ready, but not started, and what it is played with.

    `turns` are what the policy says, one after another; without any they are made of the opening's
    words and tools. `limit_s` is for one call of the environment.
    """

    environment: AnyEnvironment[Any]
    tokenizer: ChatTokenizer
    problems: Sequence[Problem] = PROBLEMS
    task: Task[Any] | None = None
    turns: Sequence[str] = ()
    max_turns: int = 8
    max_observation_tokens: int = 512
    at_once: int = 32
    limit_s: float = 10.0


@dataclass
class Played:
    """One episode: how it began, what was said, what was answered, and the slowest call."""

    problem: Problem
    opening: Opening
    said: list[Turn] = field(default_factory=list)
    answers: list[Observation] = field(default_factory=list)
    slowest_s: float = 0.0
    outcome: float | None = None

    def view(self) -> list[object]:
        """All that the model is shown and given, states left out."""
        opening = self.opening
        begun = (opening.suffix, opening.system, opening.tools, opening.messages)
        return [begun, *(replace(answer, state=None) for answer in self.answers)]

    def score(self) -> float | None:
        """The environment's own score."""
        if self.outcome is not None:
            return self.outcome
        rewards = tuple(answer.reward for answer in self.answers)
        outcome = next((a.outcome for a in self.answers[::-1] if a.outcome is not None), None)
        empty = PromptGroup(self.problem, ())
        return score_of(Episode(empty, None, rewards=rewards, reward=outcome))

    def shown(self) -> str:
        """What the environment wrote to the model."""
        opening = self.opening
        texts = [opening.suffix, opening.system or "", *(m.content for m in opening.messages)]
        for answer in self.answers:
            texts += [answer.text, *(m.content for m in answer.messages)]
        return "\n".join(texts)


Says = Callable[[Problem, Opening], Sequence[Turn]]
"""What the policy says in an episode."""


@dataclass
class Playing:
    subject: EnvironmentSubject
    live: LiveEnvironment[Any]

    @property
    def value(self) -> Environment[Any] | None:
        """The environment, if its states are values."""
        made = self.subject.environment
        return made if isinstance(made, Environment) else None

    def turns(self) -> Turns:
        special = self.value is not None and self.value.reads_special_tokens
        subject = self.subject
        return Turns(subject.tokenizer, subject.max_turns, subject.max_observation_tokens, special)

    async def play(
        self, problem: Problem | None = None, seed: int = 0, says: Says | None = None
    ) -> Played:
        """An episode to its end, or as long as there is something to say; it is closed."""
        problem = problem or self.subject.problems[0]
        limit = self.subject.limit_s
        began = time.perf_counter()
        opening = await limited(self.live.reset(problem, seed), limit, "`reset`")
        found = Played(problem, opening, slowest_s=time.perf_counter() - began)
        expect(isinstance(opening, Opening), f"`reset` gives {type(opening).__name__}, not Opening")
        found.opening = replace(opening, tools=(*self.live.schemas(), *opening.tools))
        state = opening.state
        try:
            for turn in (says or self.says)(problem, found.opening)[: self.subject.max_turns]:
                began = time.perf_counter()
                what = f"`step` with {turn.text[:40]!r}"
                answer = await limited(self.live.step(state, turn), limit, what)
                found.slowest_s = max(found.slowest_s, time.perf_counter() - began)
                expect_sound(answer, f"to the text {turn.text[:40]!r}")
                found.said.append(turn)
                found.answers.append(answer)
                if answer.done or answer.truncated:
                    break
                state = answer.state
            found.outcome = await limited(self.live.score(state), SCORE_S, "`score`")
        finally:
            await limited(self.live.close(state), limit, "`close`")
        return found

    def says(self, problem: Problem, opening: Opening) -> list[Turn]:
        """The given turns, or words of the opening and calls of its tools."""
        subject = self.subject
        stops = () if self.value is None else self.value.stop_strings()
        texts = list(subject.turns)
        if not texts:
            shown = "\n".join([opening.suffix, *(m.content for m in opening.messages)])
            words = sorted({*WORD.findall(shown), "2"})
            texts = random.Random(problem.key).sample(words, min(len(words), subject.max_turns))
            texts = (texts * subject.max_turns)[: subject.max_turns]
            if stops:  # calls as the instructions show them, and odd ones
                calls = [
                    (call[: len(call) - len(rest)]).replace("...", "2")
                    for call in CALL.findall(shown)
                    for stop in stops
                    for _, found, rest in [call.partition(stop)]
                    if found
                ]
                texts = [*calls, *(text + stops[0] for text in texts)]
        made = [scripted(text, ended=not any(text.endswith(s) for s in stops)) for text in texts]
        if subject.turns or not opening.tools:
            return made
        offered = [ToolCall(*_called(tool), id="call00000") for tool in opening.tools]
        random.Random(problem.key).shuffle(offered)
        return [Turn("", True, Message("assistant", tool_calls=(c,))) for c in offered] + made


def scripted(text: str, *, ended: bool = True) -> Turn:
    return Turn(text, ended, Message("assistant", text))


def always(text: str, turns: int) -> Says:
    """One text in each turn."""
    return lambda problem, opening: [scripted(text)] * turns


def _called(tool: ToolSchema) -> tuple[str, Json]:
    """A tool's name, and arguments that fit its schema as far as that is easy."""
    function = tool["function"]
    return function["name"], _sample(function.get("parameters", {})) or {}


def _sample(schema: Json) -> Any:  # Any: JSON
    if "enum" in schema:
        return schema["enum"][0]
    properties = schema.get("properties", {})
    if properties or schema.get("type") == "object":
        return {name: _sample(properties.get(name, {})) for name in schema.get("required", ())}
    plain = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "null": None}
    return plain.get(str(schema.get("type")), "1")


class AsLive(LiveEnvironment[NoConfig]):
    """A value environment as a live one: each call in a thread, as many as it allows at once."""

    name = "value"
    Config = NoConfig
    deterministic: ClassVar[bool] = True

    def __init__(self, inner: Environment[Any]) -> None:
        super().__init__(NoConfig())
        self.inner = inner

    async def start(self) -> None:
        self._room = asyncio.Semaphore(min(self.inner.at_once, 64))

    async def reset(self, problem: Problem, seed: int) -> Opening:
        return await self._apart(lambda: self.inner.reset(problem))

    async def step(self, state: object, turn: Turn) -> Observation:
        return await self._apart(lambda: self.inner.step(state, turn))

    async def _apart(self, call: Callable[[], T]) -> T:
        async with self._room:
            return await apart(call)


async def apart(call: Callable[[], T]) -> T:
    """What `call` gives, from a thread that nobody waits for when the process ends."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def tell(result: Any, error: BaseException | None) -> None:  # Any: T, or None
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = call()
        except Exception as problem:  # it is raised where it is waited for
            error = problem
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=run, daemon=True).start()
    return await future


async def limited(call: Coroutine[Any, Any, T], limit_s: float, what: str) -> T:
    """What `call` gives within `limit_s`."""
    try:
        return await within(limit_s, call)
    except Deaf:
        raise Broken(
            f"{what} took more than {limit_s:g} s, and goes on when it is cancelled"
        ) from None
    except TimeoutError:
        raise Broken(f"{what} took more than {limit_s:g} s") from None
