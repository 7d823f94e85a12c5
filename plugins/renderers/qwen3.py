"""Qwen3: ChatML in which each turn of the assistant's begins with its reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from posttrain.core.contracts import PluginConfig
from posttrain.core.data.turns import Piece, TurnRenderer
from posttrain.core.types import ToolSchema
from posttrain.plugins.renderers.chatml import LAYOUT, system_turn


class Qwen3Config(PluginConfig):
    """Settings of `qwen3`."""

    think: Literal["always", "given"] = Field(
        default="always",
        description="blocks of reasoning: in each turn of the assistant's, empty ones included, or "
        "only where a message has reasoning, as models without thinking (Instruct-2507) expect",
    )


class Qwen3Renderer(TurnRenderer[Qwen3Config]):
    """turn = <|im_start|>assistant <think> reasoning </think> content calls <|im_end|>.

    The model's own template removes reasoning before the last user message, and so changes tokens
    that were sampled; here it stays. Source: the chat templates of Qwen3 and Qwen3-Instruct-2507.
    """

    name = "qwen3"
    Config = Qwen3Config
    form = "hermes"
    call_gap = "\n"
    layout = LAYOUT

    def adapt(self) -> None:
        """Write blocks of reasoning as the config says."""
        self.always_think = self.config.think == "always"

    def opening(self, system: str | None, tools: Sequence[ToolSchema]) -> list[Piece]:
        """The system turn, if there is a system message or a tool."""
        return system_turn(system, tools)
