"""How many of a response's tool calls a tool could take: well-formed, known, rightly filled in."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic import Field, field_validator

from posttrain.core.contracts import PluginConfig, Reward
from posttrain.core.runtime import json_files as strict_json
from posttrain.core.types import Problem, RewardSample, Score

CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
STEPS = ("parsed", "known", "valid")


class ToolCallConfig(PluginConfig):
    """Settings of `tool_call`."""

    tools: tuple[dict[str, Any], ...] = Field(  # Any: JSON
        default=(),
        description="the tools, as chat templates take them: {name, parameters}, `parameters` a "
        "JSON schema, alone or under `function`",
    )
    metadata_key: str | None = Field(
        default=None,
        description="where a problem's metadata hold a list of tools of its own, as JSON text; "
        "problems without it use `tools`",
    )
    no_calls: float | None = Field(
        default=None, ge=0, le=1, description="value of a response without a call; null = unscored"
    )

    @field_validator("tools")
    @classmethod
    def _are_tools(cls, value: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        _validators(value)
        return value


class ToolCallReward(Reward[ToolCallConfig]):
    """R_i = calls that parse, name a known tool and fit its parameters / all calls.

    A call is <tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Hermes and Qwen write it;
    one that is never closed counts as one that does not parse. JSON is strict, nothing is repaired.
    Of a response of several turns the calls of all turns count, and nothing that a tool wrote.
    Components: the shares that were `parsed`, of a `known` tool, and `valid`. Wrong tools in the
    metadata are the data's fault: unscored, status `error`.
    Source: tool_call_valid; Hermes function calling format (NousResearch), used by Qwen2.5.
    """

    name = "tool_call"
    Config = ToolCallConfig

    def score(self, samples: Sequence[RewardSample]) -> list[Score]:
        """Scores in [0, 1], in order; None as `no_calls` says, or where the tools are wrong."""
        return [self._score(sample) for sample in samples]

    def unreadable(self, problem: Problem) -> str:
        """Whether tools of the problem's own are well described."""
        try:
            self._known(problem)
        except (ValueError, strict_json.NotJson) as error:
            return f"the tools are wrong: {error}"
        return ""

    def _known(self, problem: Problem) -> dict[str, Any]:  # Any: jsonschema's validators
        own = problem.metadata.get(self.config.metadata_key or "")
        return _validators(self.config.tools if own is None else strict_json.loads(own))

    def _score(self, sample: RewardSample) -> Score:
        calls = [call for turn in sample.turns or (sample.text,) for call in CALL.findall(turn)]
        if not calls:
            value = self.config.no_calls
            return Score(value, "unscored" if value is None else "ok", "no tool call")
        try:
            known = self._known(sample.problem)
            found = [_judged(call, bool(end), known) for call, end in calls]
        except (ValueError, strict_json.NotJson) as error:
            return Score(None, "error", f"the tools are wrong: {error}")
        reached = [step for step, _ in found]
        shares = {
            name: sum(step >= need for step in reached) / len(calls)
            for need, name in enumerate(STEPS, 1)
        }
        wrong = next((detail for step, detail in found if step < len(STEPS)), "")
        return Score(shares["valid"], detail=wrong, components=shares)


def _judged(
    call: str, closed: bool, known: dict[str, Any]
) -> tuple[int, str]:  # Any: jsonschema's validators
    """How many of `STEPS` a call takes, and what stopped it."""
    if not closed:
        return 0, "the call is never closed"
    try:
        value = strict_json.loads(call)
    except strict_json.NotJson as error:
        return 0, f"not JSON: {error}"
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return 0, "not an object with a name"
    if value["name"] not in known:
        return 1, f"unknown tool '{value['name'][:80]}'"
    extra = sorted(set(value) - {"name", "arguments"})
    if extra or not isinstance(value.get("arguments", {}), dict):
        return 2, f"unexpected {extra}" if extra else "arguments are no object"
    complaint = strict_json.complaint(known[value["name"]], value.get("arguments", {}))
    return (3, "") if complaint is None else (2, f"{value['name']}: {complaint}")


def _validators(tools: Any) -> dict[str, Any]:  # Any: JSON; jsonschema's validators
    """A validator of the arguments of each tool, by its name; raises `ValueError`."""
    made = {}
    for tool in tools if isinstance(tools, (list, tuple)) else [tools]:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"a tool is an object with a name and parameters, not {tool!r:.80}")
        made[function["name"]] = strict_json.validator(function.get("parameters", {}))
    return made
