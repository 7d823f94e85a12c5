"""Tool calls as messages: tools as JSON schemas, calls as the model's format has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import model_validator

from posttrain.core.contracts import (
    Environment,
    Observation,
    Opening,
    Tool,
    ToolResult,
    Turn,
)
from posttrain.core.rollout.tool_use import ANY_NUMBER, ToolUseConfig, answer_of
from posttrain.core.types import Message, Problem, ToolCall


class ToolCallsConfig(ToolUseConfig):
    """Settings of `tool_calls`."""

    @model_validator(mode="after")
    def _names_differ(self) -> ToolCallsConfig:
        names = [tool.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise ValueError(f"the tools {names} are not of different names; remove one of each")
        return self


class ToolCallsEnvironment(Environment[ToolCallsConfig]):
    """observation = a message of role tool with tool(arguments), for each call of the turn.

    The prompt offers the tools' JSON schemas in the form of the model's chat template, which also
    says how calls and results are written. A call of no tool, with arguments that do not fit, or
    beyond `max_calls` gets an error as its result and counts as failed, as does a call that cannot
    be read. A turn without calls is the answer. Source: the function calls of chat APIs, as in
    Hermes' and Qwen's templates.
    """

    name = "tool_calls"
    Config = ToolCallsConfig
    at_once = ANY_NUMBER

    def __init__(self, config: ToolCallsConfig) -> None:
        super().__init__(config)
        self._tools: dict[str, Tool[Any]] = {}

    def setup(self, tools: Sequence[Tool[Any]]) -> None:
        """Take the tools, each under its name."""
        self._tools = {tool.name: tool for tool in tools}

    def reset(self, problem: Problem) -> Opening:
        """No calls yet, and the tools' schemas."""
        return Opening(0, tools=tuple(tool.schema() for tool in self._tools.values()))

    def step(self, state: object, turn: Turn) -> Observation:
        """The results of the calls that `turn` makes."""
        assert isinstance(state, int)
        calls, malformed = turn.message.tool_calls, turn.message.malformed
        if not calls and not malformed:
            return Observation("", True, state)
        messages, failed = [], 0
        for number, call in enumerate(calls):
            result = self._result(state + number, call)
            failed += result.failed
            text = result.text[: self.config.max_result_chars]
            messages.append(Message("tool", text, name=call.name, tool_call_id=call.id))
        for _ in malformed:
            failed += 1
            messages.append(
                Message(
                    "tool",
                    "error: the tool call could not be read, expected an object with the tool's "
                    "name and its arguments as JSON",
                )
            )
        count = len(messages)
        counts = {"calls": float(count), "failed": float(failed)}
        return Observation("", False, state + count, counts, tuple(messages))

    def _result(self, made: int, call: ToolCall) -> ToolResult:
        if made >= self.config.max_calls:
            return self.config.none_left()
        tool = self._tools.get(call.name)
        if tool is None:
            known = ", ".join(self._tools)
            return ToolResult(f"error: no such tool; the tools are {known}", failed=True)
        return answer_of(tool.call_json, call.arguments)
