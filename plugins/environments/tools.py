"""Tool use: the policy calls tools between tags and reads their results in its own response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from posttrain.core.contracts import (
    Environment,
    Observation,
    Opening,
    Tool,
    ToolResult,
    Turn,
)
from posttrain.core.rollout.tool_use import ANY_NUMBER, MaxCalls, ToolUseConfig, answer_of
from posttrain.core.types import Problem


class ToolsConfig(ToolUseConfig):
    """Settings of `tools`."""

    tags: dict[str, str] = Field(
        default={}, description="tool -> its tag; those that are not named have their own name's"
    )
    call_open: str = Field(default="<{tag}>", description="what begins a call; may be empty")
    call_close: str = Field(
        default="</{tag}>", min_length=1, description="what ends a call, and the turn"
    )
    result: str = Field(
        default="<result>{result}</result>", description="how a result is shown to the model"
    )
    max_calls: MaxCalls = 3
    instructions: str | None = Field(
        default=None,
        description="instructions to the model; {calls} is the list of tools. null = a short text",
    )
    place: Literal["prompt", "system"] = Field(
        default="prompt", description="instructions end the prompt, or are the system message"
    )

    @field_validator("result")
    @classmethod
    def _shows_the_result(cls, value: str) -> str:
        if "{result}" not in value:
            raise ValueError("it must contain {result}, or the model never sees one")
        return value

    @model_validator(mode="after")
    def _calls_differ(self) -> ToolsConfig:
        names = [tool.name for tool in self.tools]
        strangers = sorted(set(self.tags) - set(names))
        if strangers:
            raise ValueError(f"tags name {strangers}, which are not among the tools {names}")
        opens = [self.call_open.replace("{tag}", self.tags.get(n, n)) for n in names]
        if len(set(opens)) < len(opens):
            raise ValueError(f"the tools {names} would be called by the same text: {opens}")
        return self


INSTRUCTIONS = (
    "\n\nYou can use tools. Write a call, and its result follows:\n{calls}\n"
    "Results appear as {shown}. At most {max_calls} calls. Then give the answer."
)


class ToolsEnvironment(Environment[ToolsConfig]):
    """observation = result.format(tool(argument)), after each turn that ends with a closing tag.

    The argument is the text between the last opening tag and the closing one. A call without an
    opening tag, of no tool, or beyond `max_calls` gets an error as its result, and counts as
    failed, as does a tool that fails. A turn that the model ends itself is its answer.
    Source: tool-integrated rollouts of ARPO, arXiv:2507.19849, section 3.1, and Search-R1,
    arXiv:2503.09516.
    """

    name = "tools"
    Config = ToolsConfig
    at_once = ANY_NUMBER

    def __init__(self, config: ToolsConfig) -> None:
        super().__init__(config)
        self._tools: dict[str, Tool[Any]] = {}  # by tag

    def setup(self, tools: Sequence[Tool[Any]]) -> None:
        """Take the tools, each under its tag."""
        self._tools = {self.config.tags.get(tool.name, tool.name): tool for tool in tools}

    def stop_strings(self) -> tuple[str, ...]:
        """The closing tags."""
        return tuple(
            dict.fromkeys(self._written(self.config.call_close, tag) for tag in self._tools)
        )

    def reset(self, problem: Problem) -> Opening:
        """No calls yet."""
        config = self.config
        calls = "\n".join(f"{self._call(tag)}: {t.description}" for tag, t in self._tools.items())
        text = INSTRUCTIONS if config.instructions is None else config.instructions
        shown = config.result.replace("{result}", "...")
        reported = text.replace("{calls}", calls).replace("{shown}", shown)
        reported = reported.replace("{max_calls}", str(config.max_calls))
        if config.place == "system":
            # Our own instructions begin with an empty line, to stand after a question.
            return Opening(0, system=reported.strip() if config.instructions is None else reported)
        return Opening(0, suffix=reported)

    def step(self, state: object, turn: Turn) -> Observation:
        """The result of the call that `turn` ends with."""
        assert isinstance(state, int)
        if turn.ended:
            return Observation("", True, state)
        result = self._result(state, turn.text)
        text = self.config.result.replace("{result}", result.text[: self.config.max_result_chars])
        return Observation(text, False, state + 1, {"calls": 1.0, "failed": float(result.failed)})

    def _result(self, calls: int, text: str) -> ToolResult:
        if calls >= self.config.max_calls:
            return self.config.none_left()
        closes = {tag: text.find(self._written(self.config.call_close, tag)) for tag in self._tools}
        end = min((at for at in closes.values() if at >= 0), default=len(text))
        opened = [
            (text.rfind(opening, 0, end) + len(opening), tag)
            for tag, at in closes.items()
            if at == end and (opening := self._written(self.config.call_open, tag)) in text[:end]
        ]
        if not opened:
            known = ", ".join(map(self._call, self._tools))
            return ToolResult(f"error: no tool was called; calls are {known}", failed=True)
        start, tag = max(opened)
        return answer_of(self._tools[tag].call, text[start if self.config.call_open else 0 : end])

    def _call(self, tag: str) -> str:
        parts = (self.config.call_open, "...", self.config.call_close)
        return "".join(self._written(part, tag) for part in parts)

    def _written(self, template: str, tag: str) -> str:
        return template.replace("{tag}", tag)
