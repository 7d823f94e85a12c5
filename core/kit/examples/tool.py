"""A tool: counts the letters of a text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from posttrain.core.contracts import NoConfig, Tool, ToolResult


class Example(Tool[NoConfig]):
    """result = the number of letters in the argument. Source: an example."""

    name = "example"
    Config = NoConfig
    description = "counts the letters of a text"
    parameters: ClassVar[Mapping[str, Any]] = {  # Any: a JSON schema
        "type": "object",
        "properties": {"text": {"type": "string", "description": "the text to count in"}},
        "required": ["text"],
    }

    def call(self, arguments: str) -> ToolResult:
        """The count; a text that cannot be answered is a failed result, never an exception."""
        if not arguments.strip():
            return ToolResult("error: there is no text", failed=True)
        return ToolResult(str(sum(character.isalpha() for character in arguments)))
