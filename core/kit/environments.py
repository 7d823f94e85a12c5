"""What environments and tools promise."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import time
from typing import Any

from posttrain.core.config.presets import tool_components
from posttrain.core.contracts import (
    Environment,
    LiveEnvironment,
    Observation,
    Opening,
    Tool,
    ToolResult,
    Turn,
)
from posttrain.core.errors import ResourceError
from posttrain.core.kit.checks import Skipped, Subject, check, expect, expect_equal
from posttrain.core.types import Message, Problem

PROBLEM = Problem("k", "What is 1 + 1?", "2", "2")
TEXTS = (
    *("", " ", "2", "What?", "\x00", "((", "1 + 1", "<calculator>1 + 1</calculator>", "{}"),
    *('{"name": "f"}', "\U0001f600", "١٢", "a" * 10_000, "</result>", "<|im_end|>"),
)
MOST_TURNS = 50
SLOW_S = 2.0
STARTS_S = 60.0
PLAYED = "its episodes are not values: `posttrain env check` plays them"


def _ready(subject: Subject) -> Environment[Any]:  # Any: environments of any config
    made: Environment[Any] = subject.build()
    if not isinstance(made, Environment):
        raise Skipped(PLAYED)
    named = tool_components(made.config.model_dump(mode="json"))
    made.setup([subject.manager.build(Tool, each.name, each.fields()) for _, each in named])
    return made


def _turn(text: str, *, ended: bool) -> Turn:
    return Turn(text, ended, Message("assistant", text))


@check("an episode begins, answers any text and comes to an end", "environment")
def _episode(subject: Subject) -> None:
    for text in TEXTS:
        environment = _ready(subject)
        opening = environment.reset(PROBLEM)
        expect(isinstance(opening, Opening), f"`reset` gives {type(opening).__name__}, not Opening")
        state, done = opening.state, False
        for number in range(MOST_TURNS):
            found = environment.step(state, _turn(text, ended=number % 2 == 1))
            expect_sound(found, f"to the text {text[:40]!r}")
            kept = environment.gives_rewards or not environment.stop_strings()
            expect(
                found.reward is None or kept,
                "it rewards turns that may end with a stop string; set `gives_rewards = True`, or "
                "the reward of the last turn is lost",
            )
            state, done = found.state, found.done
            if done:
                break
        expect(done, f"after {MOST_TURNS} turns of {text[:40]!r}, half of them ended, it goes on")


def expect_sound(found: object, where: str) -> None:
    if not isinstance(found, Observation):
        expect(False, f"{where} `step` gives {type(found).__name__}, not Observation")
        return
    expect(isinstance(found.text, str), f"{where} the observation's text is not text")
    expect(not (found.text and found.messages), f"{where} it answers with a text and messages")
    odd = sorted(name for name, count in found.counts.items() if not math.isfinite(count))
    expect(not odd, f"{where} the counts {odd} are not finite")


@check("live episodes begin, answer any text and are closed", "environment")
def _live(subject: Subject) -> None:
    made = subject.build()
    if not isinstance(made, LiveEnvironment):
        raise Skipped("it is not a live environment")

    async def all_texts() -> None:
        try:
            await asyncio.wait_for(made.start(), STARTS_S)
            json.dumps(made.schemas())
            for text in TEXTS:
                await asyncio.wait_for(_lived(made, text), STARTS_S)
        finally:
            await made.stop()

    try:
        asyncio.run(all_texts())
    except ResourceError as error:  # a server or a package that is not here
        raise Skipped(str(error)) from error


async def _lived(made: LiveEnvironment[Any], text: str) -> None:
    """One short episode in which every turn is `text`."""
    opening = await made.reset(PROBLEM, 0)
    expect(isinstance(opening, Opening), f"`reset` gives {type(opening).__name__}, not Opening")
    state = opening.state
    try:
        for _ in range(3):
            found = await made.step(state, _turn(text, ended=True))
            expect_sound(found, f"to the text {text[:40]!r}")
            if found.done or found.truncated:
                break
            state = found.state
    finally:
        await made.close(state)


@check("a state is a value: steps change none, and give the same each time", "environment")
def _states(subject: Subject) -> None:
    for text in TEXTS:
        environment = _ready(subject)
        state = environment.reset(PROBLEM).state
        before = copy.deepcopy(state)
        first = environment.step(state, _turn(text, ended=False))
        expect_equal(state, before, f"the state after a step with {text[:40]!r}")
        again = environment.step(state, _turn(text, ended=False))
        expect_equal(again, first, f"a second step from the same state with {text[:40]!r}")
        other = _ready(subject)
        expect_equal(
            other.step(other.reset(PROBLEM).state, _turn(text, ended=False)),
            first,
            f"the step of another environment with {text[:40]!r}",
        )


@check("stop strings are texts", "environment")
def _stops(subject: Subject) -> None:
    stops = _ready(subject).stop_strings()
    expect(all(isinstance(s, str) and s for s in stops), f"they are {stops!r}")


@check("any text gets an answer, the same each time and soon", "tool")
def _calls(subject: Subject) -> None:
    tool: Tool[Any] = subject.build()
    for text in TEXTS:
        began = time.perf_counter()
        found = tool.call(text)
        took = time.perf_counter() - began
        expect(isinstance(found, ToolResult), f"`call` gives {type(found).__name__}")
        expect(took < SLOW_S, f"the text {text[:40]!r} took {took:.1f} s")
        expect_equal(subject.build().call(text), found, f"the answer to {text[:40]!r}")


@check("it says to the model what it does, as a JSON schema", "tool")
def _schema(subject: Subject) -> None:
    tool: Tool[Any] = subject.build()
    expect(tool.description.strip(), "it has no `description`, which is what the model reads")
    json.dumps(tool.schema())
    properties = tool.parameters.get("properties")
    expect(isinstance(properties, dict), "`parameters` is not the schema of an object")


@check("calls by JSON are answered; those that do not fit are failures", "tool")
def _json_calls(subject: Subject) -> None:
    tool: Tool[Any] = subject.build()
    names = list(tool.parameters.get("properties", {}))
    if len(names) != 1 and type(tool).call_json is Tool.call_json:
        expect(False, f"it has the arguments {names} and no call_json of its own")
    if not names:
        raise Skipped("it takes no arguments")
    strange = tool.call_json({"no_such_argument": 1})
    expect(strange.failed, "a call with an argument that it does not have counts as right")
    if len(names) == 1:
        for value in ("1 + 1", 2, [1, None]):
            expect(isinstance(tool.call_json({names[0]: value}), ToolResult), "not a ToolResult")
