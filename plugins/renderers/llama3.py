"""Llama 3: <|start_header_id|>ROLE<|end_header_id|> ... <|eot_id|>, calls as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

from pydantic import Field

from posttrain.core.contracts import PluginConfig
from posttrain.core.data.tool_calls import PYTHON_TAG, json_text
from posttrain.core.data.turns import Layout, Piece, TurnRenderer, fixed, given
from posttrain.core.types import Message, ToolSchema

TOOLS = (
    "Given the following functions, please respond with a JSON for a function call with its proper "
    "arguments that best answers the given prompt.\n\n"
    'Respond in the format {"name": function name, "parameters": dictionary of argument name and '
    "its value}.Do not use variables.\n\n"
)


class Llama3Config(PluginConfig):
    """Settings of `llama3`."""

    dates: bool | None = Field(
        default=None,
        description="whether the system turn gives the model's knowledge date and `date_string`, "
        "as from Llama 3.1 on; null = as the model's own chat template, without one from 3.1 on",
    )
    date_string: str = Field(
        default="26 Jul 2024",
        description="the date that conversations take place on; Llama 3.1's default, whatever the "
        "day, because tokens of a row must not depend on when it is rendered",
    )


def _header(role: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n"


class Llama3Renderer(TurnRenderer[Llama3Config]):
    """turn = <|start_header_id|>role<|end_header_id|> content <|eot_id|>; contents are trimmed.

    Tools stand in the user's first message, results in turns of `ipython` as JSON strings. A turn
    with content and calls has <|python_tag|> between them; Llama's own template leaves the content
    out. Source: the chat templates of Llama 3, 3.1 and 3.2.
    """

    name = "llama3"
    Config = Llama3Config
    form = "llama3"
    call_gap = PYTHON_TAG
    layout = Layout(
        system=(_header("system"), "<|eot_id|>"),
        user=(_header("user"), "<|eot_id|>"),
        assistant=_header("assistant"),
        end="<|eot_id|>",
        result=(_header("ipython"), "<|eot_id|>"),
        trim=True,
    )

    def adapt(self) -> None:
        """Decide whether the system turn gives dates."""
        template = self.tokenizer.chat_template
        if self.config.dates is not None:
            self._dates = self.config.dates
        elif isinstance(template, str):
            self._dates = "Cutting Knowledge Date" in template
        else:
            self._dates = PYTHON_TAG in self.controls

    def opening(self, system: str | None, tools: Sequence[ToolSchema]) -> list[Piece]:
        """The system turn, from Llama 3.1 on in every conversation."""
        start = self.tokenizer.bos_token or ""
        if not self._dates and system is None:
            return [fixed(start)]
        facts = "Environment: ipython\n" if tools else ""
        facts += "Cutting Knowledge Date: December 2023\n"
        facts += f"Today Date: {self.config.date_string}\n\n"
        turn = start + _header("system") + (facts if self._dates else "")
        return [fixed(turn), given((system or "").strip()), fixed("<|eot_id|>")]

    def first_user(
        self, system: str | None, tools: Sequence[ToolSchema]
    ) -> tuple[list[Piece], list[Piece]]:
        """The tools, before the content."""
        if not tools:
            return [], []
        schemas = "".join(json.dumps(t, ensure_ascii=False, indent=4) + "\n\n" for t in tools)
        return [], [fixed(TOOLS), given(schemas)]

    def result_text(self, message: Message, place: int) -> list[Piece]:
        """The result as a JSON string."""
        return [given(json_text(message.content))]
