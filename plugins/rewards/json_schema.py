"""Whether the response is JSON that fits a schema: strict, and nothing is repaired."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, field_validator

from posttrain.core.contracts import PluginConfig, Reward
from posttrain.core.runtime import json_files as strict_json
from posttrain.core.types import Problem, RewardSample, Score

FENCED = re.compile(
    r"^[ \t]*```(?:json)?[ \t\r]*\n(.*?)\n[ \t]*```[ \t\r]*$",
    re.DOTALL | re.MULTILINE | re.IGNORECASE,
)


class JsonSchemaConfig(PluginConfig):
    """Settings of `json_schema`."""

    must_fit: dict[str, Any] = Field(  # Any: a JSON schema
        default_factory=dict,
        description="the JSON schema (draft 2020-12 unless it names another); {} = any JSON",
    )
    metadata_key: str | None = Field(
        default=None,
        description="where a problem's metadata hold a schema of its own, as JSON text; problems "
        "without it use `must_fit`",
    )
    fenced: Literal["no", "allowed", "required"] = Field(
        default="no",
        description="no: the whole response is the JSON; allowed: or its only fenced code block; "
        "required: only that",
    )

    @field_validator("must_fit")
    @classmethod
    def _is_a_schema(cls, value: dict[str, Any]) -> dict[str, Any]:
        strict_json.validator(value)
        return value


class JsonSchemaReward(Reward[JsonSchemaConfig]):
    """R_i = 1[the response parses as JSON and fits the schema], else 0; nothing is repaired.

    NaN, Infinity, a key that stands twice and nesting beyond 200 are not JSON here. Components:
    `parsed` and `fits`. A schema in the metadata that is wrong is the data's fault: unscored,
    status `error`. References in a schema are never fetched.
    Source: json_valid; JSON, RFC 8259; JSON Schema, draft 2020-12.
    """

    name = "json_schema"
    Config = JsonSchemaConfig

    def score(self, samples: Sequence[RewardSample]) -> list[Score]:
        """1.0 or 0.0 per sample, in order; None where the problem's schema is wrong."""
        return [self._score(sample) for sample in samples]

    def unreadable(self, problem: Problem) -> str:
        """Whether a schema of the problem's own is one."""
        try:
            self._validator(problem)
        except (ValueError, strict_json.NotJson) as error:
            return str(error)
        return ""

    def _score(self, sample: RewardSample) -> Score:
        text = self._json_text(sample.text)
        if text is None:
            return _failed("no fenced block, or more than one", parsed=False)
        try:
            value = strict_json.loads(text)
        except strict_json.NotJson as error:
            return _failed(f"not JSON: {error}", parsed=False)
        try:
            complaint = strict_json.complaint(self._validator(sample.problem), value)
        except (ValueError, strict_json.NotJson) as error:
            return Score(None, "error", str(error))
        if complaint is not None:
            return _failed(complaint, parsed=True)
        return Score(1.0, components={"parsed": 1.0, "fits": 1.0})

    def _json_text(self, text: str) -> str | None:
        blocks = FENCED.findall(text) if self.config.fenced != "no" else []
        if len(blocks) == 1:
            return str(blocks[0])
        return None if self.config.fenced == "required" else text

    def _validator(self, problem: Problem) -> Any:  # Any: jsonschema's validator
        own = problem.metadata.get(self.config.metadata_key or "")
        return strict_json.validator(
            self.config.must_fit if own is None else strict_json.loads(own)
        )


def _failed(detail: str, *, parsed: bool) -> Score:
    return Score(0.0, detail=detail, components={"parsed": float(parsed), "fits": 0.0})
