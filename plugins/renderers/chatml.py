"""ChatML: <|im_start|>ROLE ... <|im_end|>, as Qwen2.5, SmolLM2 and Hermes have it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pydantic import Field

from posttrain.core.contracts import PluginConfig
from posttrain.core.data.chat import own_template
from posttrain.core.data.turns import (
    Layout,
    Piece,
    TurnRenderer,
    fixed,
    given,
    schema_lines,
)
from posttrain.core.types import Message, ToolSchema

TOOLS_BEFORE = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
TOOLS_AFTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
    'within <tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, '
    '"arguments": <args-json-object>}\n</tool_call>'
)

LAYOUT = Layout(
    system=("<|im_start|>system\n", "<|im_end|>\n"),
    user=("<|im_start|>user\n", "<|im_end|>\n"),
    assistant="<|im_start|>assistant\n",
    end="<|im_end|>",
    after="\n",
    results_open="<|im_start|>user",
    result=("\n<tool_response>\n", "\n</tool_response>"),
    results_close="<|im_end|>\n",
)


def system_turn(system: str | None, tools: Sequence[ToolSchema]) -> list[Piece]:
    """The first system message with the tools; empty without both."""
    if system is None and not tools:
        return []
    pieces = [fixed("<|im_start|>system\n"), given(system or "")]
    if tools:
        gap = "\n\n" if system is not None else ""
        pieces += [fixed(gap + TOOLS_BEFORE), given(schema_lines(tools)), fixed(TOOLS_AFTER)]
    return [*pieces, fixed("<|im_end|>\n")]


class ChatmlConfig(PluginConfig):
    """Settings of `chatml`."""

    default_system: str | None = Field(
        default=None,
        description="system message of conversations without one; null = the one that the model's "
        "own chat template writes, if any",
    )


class ChatmlRenderer(TurnRenderer[ChatmlConfig]):
    """turn = <|im_start|>role content <|im_end|>; calls and tool results between tags.

    Results of one turn's calls are one user turn. Source: the chat templates of Qwen2.5 and
    SmolLM2; Hermes function calling format (NousResearch).
    """

    name = "chatml"
    Config = ChatmlConfig
    form = "hermes"
    call_gap = "\n"
    layout = LAYOUT

    def adapt(self) -> None:
        """Find the model's own default system message."""
        self._default = self.config.default_system
        if self._default is None:
            shown = own_template(self.tokenizer, [Message("user", "Q")], generation_prompt=False)
            found = re.match(r"\s*<\|im_start\|>system\n(.*?)<\|im_end\|>", shown or "", re.DOTALL)
            self._default = found[1] if found else None

    def opening(self, system: str | None, tools: Sequence[ToolSchema]) -> list[Piece]:
        """The system turn, with the default message."""
        return system_turn(self._default if system is None else system, tools)
