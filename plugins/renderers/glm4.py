"""GLM-4.5: turns that end where the next one begins, calls as keys and values."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.core.contracts import NoConfig
from posttrain.core.data.tool_calls import split_reasoning
from posttrain.core.data.turns import Layout, Piece, TurnRenderer, fixed, given, schema_lines
from posttrain.core.types import Message, ToolSchema

TOOLS_BEFORE = (
    "<|system|>\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
TOOLS_AFTER = (
    "\n</tools>\n\nFor each function call, output the function name and arguments within the "
    "following XML format:\n<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n"
    "<arg_value>{arg-value-1}</arg_value>\n<arg_key>{arg-key-2}</arg_key>\n"
    "<arg_value>{arg-value-2}</arg_value>\n...\n</tool_call>"
)


class Glm4Renderer(TurnRenderer[NoConfig]):
    """turn = <|role|> content; the model ends its own with <|user|>, after calls <|observation|>.

    So that this is learned, the last turn of a finished conversation has its end, which the model's
    own template leaves out. That template also removes reasoning before the last user message; here
    it stays. Source: the chat template of GLM-4.5.
    """

    name = "glm4"
    Config = NoConfig
    form = "glm"
    always_think = True
    shared_end = True
    layout = Layout(
        system=("<|system|>\n", ""),
        user=("<|user|>\n", ""),
        assistant="<|assistant|>",
        end="<|user|>",
        results_open="<|observation|>",
        result=("\n<tool_response>\n", "\n</tool_response>"),
    )

    def opening(self, system: str | None, tools: Sequence[ToolSchema]) -> list[Piece]:
        """The tools in a system turn of their own, then the system message."""
        pieces = [fixed("[gMASK]<sop>")]
        if tools:
            pieces += [fixed(TOOLS_BEFORE), given(schema_lines(tools)), fixed(TOOLS_AFTER)]
        return pieces if system is None else [*pieces, fixed("<|system|>\n"), given(system)]

    def end_of(self, message: Message) -> str:
        """Calls are ended by what begins their results."""
        called = message.tool_calls or message.malformed
        return "<|observation|>" if called else "<|user|>"

    def body(self, message: Message, *, is_open: bool) -> str:
        """Reasoning, content and calls, each on a line of its own."""
        reasoning, content = message.reasoning, message.content
        if not reasoning and content.lstrip().startswith("<think>"):
            reasoning, content = split_reasoning(content)
        content = content.lstrip() if is_open else content.strip()
        text = f"\n<think>{reasoning.strip()}"
        if is_open and reasoning and not content and not message.tool_calls:
            return text
        parts = [content, self.calls_text(message), *message.malformed]
        return text + "</think>" + "".join("\n" + part for part in parts if part)
