"""Gemma: <start_of_turn>ROLE ... <end_of_turn>, without system turns and tools."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.core.contracts import NoConfig
from posttrain.core.data.turns import Layout, Piece, TurnRenderer, fixed, given
from posttrain.core.types import ToolSchema


class GemmaRenderer(TurnRenderer[NoConfig]):
    """turn = <start_of_turn>role content <end_of_turn>, the assistant's role being `model`.

    A first system message stands before the user's first content; contents are trimmed. Source: the
    chat templates of Gemma 2 and Gemma 3.
    """

    name = "gemma"
    Config = NoConfig
    takes_tools = False
    layout = Layout(
        user=("<start_of_turn>user\n", "<end_of_turn>\n"),
        assistant="<start_of_turn>model\n",
        end="<end_of_turn>",
        after="\n",
        trim=True,
    )

    def opening(self, system: str | None, tools: Sequence[ToolSchema]) -> list[Piece]:
        """The token that begins a sequence."""
        return [fixed(self.tokenizer.bos_token or "")]

    def first_user(
        self, system: str | None, tools: Sequence[ToolSchema]
    ) -> tuple[list[Piece], list[Piece]]:
        """The system message and an empty line."""
        return [], [] if system is None else [given(system), fixed("\n\n")]
