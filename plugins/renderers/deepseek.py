"""DeepSeek-V3, R1 and its distilled models: <｜User｜> and <｜Assistant｜>, calls in fences."""

from __future__ import annotations

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
# Text of the format: the marks in it are control tokens, as the model has to write them.
TOOLS_AFTER = (
    "\n</tools>\n\nFor function calls, first write <｜tool▁calls▁begin｜>. Write each call as:\n"
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜><function_name>\n```json\n"
    "<function_arguments_in_json_format>\n```<｜tool▁call▁end｜>\n"
    "After the last one write <｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
)


class DeepseekConfig(PluginConfig):
    """Settings of `deepseek`."""

    think: bool | None = Field(
        default=None,
        description="whether each turn of the assistant's begins with <think>, as R1's do; null = "
        "as the model's own chat template, without one not",
    )


class DeepseekRenderer(TurnRenderer[DeepseekConfig]):
    """turn = <｜User｜> content, <｜Assistant｜> content calls <｜end▁of▁sentence｜>.

    The model answers results of tools in the same turn. The models' own templates begin the group
    of results only once in a conversation, and remove reasoning of past turns; here every group has
    its marks and reasoning stays. Source: the chat templates of DeepSeek-V3 and R1; the text about
    tools, which these lack, is after the tool templates of vLLM for these models.
    """

    name = "deepseek"
    Config = DeepseekConfig
    form = "deepseek"

    def adapt(self) -> None:
        """Begin turns with reasoning as the config or the model's own template says."""
        think = self.config.think
        if think is None:
            shown = own_template(self.tokenizer, [Message("user", "Q")], generation_prompt=True)
            think = (shown or "").rstrip().endswith("<think>")
        self.always_think = self.begins_in_reasoning = think
        self.layout = Layout(
            user=("<｜User｜>", ""),
            assistant="<｜Assistant｜>" + ("<think>\n" if think else ""),
            end="<｜end▁of▁sentence｜>",
            results_open="<｜tool▁outputs▁begin｜>",
            result=("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
            results_join="\n" if think else "",
            results_close="<｜tool▁outputs▁end｜>",
        )

    def opening(self, system: str | None, tools: Sequence[ToolSchema]) -> list[Piece]:
        """The system message without any mark, then the tools."""
        pieces = [fixed(self.tokenizer.bos_token or ""), given(system or "")]
        if tools:
            gap = "\n\n" if system else ""
            pieces += [fixed(gap + TOOLS_BEFORE), given(schema_lines(tools)), fixed(TOOLS_AFTER)]
        return pieces

    def header(self, after_results: bool) -> str:
        """After results the model goes on in its turn."""
        begin = self.layout.assistant
        return begin.removeprefix("<｜Assistant｜>") if after_results else begin
