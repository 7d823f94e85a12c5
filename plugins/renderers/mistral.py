"""Mistral: [INST] ... [/INST], in the three generations of its tokenizers with tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from posttrain.core.contracts import NoConfig
from posttrain.core.data.tool_calls import ARGS, json_text, write_tool_calls
from posttrain.core.data.turns import Layout, Piece, TurnRenderer, fixed, given
from posttrain.core.runtime.json_files import NotJson, loads
from posttrain.core.types import Message, ToolSchema

V3 = Layout(
    user=("[INST]", "[/INST]"),
    assistant="",
    end="</s>",
    result=("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
)
V7 = replace(V3, system=("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"))


class MistralRenderer(TurnRenderer[NoConfig]):
    """turn = [INST] content [/INST], content calls </s>; results between [TOOL_RESULTS] marks.

    By their tokens: without [SYSTEM_PROMPT] (v3) the system message stands in the user's first
    message; with [ARGS] (v11, v13) calls are a name and arguments each. Calls without an id of nine
    characters get their place in the turn as one, as do results. Mistral's own format moves tools,
    in v3 the system message too, to the user's last message, and so changes tokens of earlier
    turns; here they stay in the first. Source: mistral-common's tokenizers v3, v7, v11 and v13.
    """

    name = "mistral"
    Config = NoConfig

    def adapt(self) -> None:
        """Choose the generation of tokenizers by its tokens."""
        self.layout = V7 if "[SYSTEM_PROMPT]" in self.controls else V3
        self.form = "mistral_args" if ARGS in self.controls else "mistral"
        self._ids_in_calls = self.form == "mistral" or "[THINK]" not in self.controls
        if "[THINK]" in self.controls:
            self.think = ("[THINK]", "[/THINK]")

    def opening(self, system: str | None, tools: Sequence[ToolSchema]) -> list[Piece]:
        """The token that begins a sequence and, from v7 on, the system message."""
        start = fixed(self.tokenizer.bos_token or "")
        if system is None or self.layout.system is None:
            return [start]
        before, after = self.layout.system
        return [start, fixed(before), given(system), fixed(after)]

    def first_user(
        self, system: str | None, tools: Sequence[ToolSchema]
    ) -> tuple[list[Piece], list[Piece]]:
        """The tools before the turn, and in v3 the system message in it."""
        turn = []
        if tools:
            schemas = given(json_text(list(tools)))
            turn = [fixed("[AVAILABLE_TOOLS]"), schemas, fixed("[/AVAILABLE_TOOLS]")]
        if system is None or self.layout.system is not None:
            return turn, []
        return turn, [given(system), fixed("\n\n")]

    def calls_text(self, message: Message) -> str:
        """The calls, with an id each where the generation has them."""
        return write_tool_calls(
            [
                replace(call, id=_nine(call.id, place) if self._ids_in_calls else "")
                for place, call in enumerate(message.tool_calls)
            ],
            self.form,
        )

    def result_text(self, message: Message, place: int) -> list[Piece]:
        """The result with the id of its call."""
        call_id = _nine(message.tool_call_id, place)
        if self.layout.system is None:
            return [given(json_text({"content": _number(message.content), "call_id": call_id}))]
        if not self._ids_in_calls:
            return [given(message.content)]
        return [given(call_id), fixed("[TOOL_CONTENT]"), given(message.content)]


def _nine(call_id: str, place: int) -> str:
    """The id if it is of nine characters, as the format demands, else the place in the turn."""
    return call_id if len(call_id) == 9 else f"{place:09d}"


def _number(content: str) -> object:
    """The content as a number if it is one, which v3 writes without quotes."""
    try:
        value = loads(content)
    except NotJson:
        return content
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and json_text(value) == content else content
