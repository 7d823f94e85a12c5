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
from posttrain.core.rollout.tool_use import (
    ANY_NUMBER,
    ToolUseConfig,
    answer_of,
    answered,
    no_such_tool,
)
from posttrain.core.types import Problem, ToolCall


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
        said = turn.message
        if not said.tool_calls and not said.malformed:
            return Observation("", True, state)
        results = [self._result(state + n, call) for n, call in enumerate(said.tool_calls)]
        messages, counts = answered(said, results, self.config.max_result_chars)
        return Observation("", False, state + len(said.tool_calls), counts, messages)

    def _result(self, made: int, call: ToolCall) -> ToolResult:
        if made >= self.config.max_calls:
            return self.config.none_left()
        tool = self._tools.get(call.name)
        if tool is None:
            return no_such_tool(self._tools)
        return answer_of(tool.call_json, call.arguments)
