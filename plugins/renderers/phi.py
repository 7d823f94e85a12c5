"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: turns by role, without tools."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.core.contracts import NoConfig
from posttrain.core.data.turns import Layout, Piece, TurnRenderer, fixed, given
from posttrain.core.types import ToolSchema


def _layout(before: str, end: str, after: str) -> Layout:
    """Turns that begin with `before`, which holds ROLE."""
    return Layout(
        system=(before.replace("ROLE", "system"), end + after),
        user=(before.replace("ROLE", "user"), end + after),
        assistant=before.replace("ROLE", "assistant"),
        end=end,
        after=after,
    )


PHI_3 = _layout("<|ROLE|>\n", "<|end|>", "\n")
PHI_4 = _layout("<|im_start|>ROLE<|im_sep|>", "<|im_end|>", "")
PHI_4_MINI = _layout("<|ROLE|>", "<|end|>", "")


class PhiRenderer(TurnRenderer[NoConfig]):
    """turn = <|role|> content <|end|> (3, 4-mini) or <|im_start|>role<|im_sep|> content <|im_end|>.

    The models' own templates end a finished conversation with one more token, which no turn of it
    has; it is left out. Source: the chat templates of Phi-3, Phi-3.5, Phi-4 and Phi-4-mini.
    """

    name = "phi"
    Config = NoConfig
    takes_tools = False

    def adapt(self) -> None:
        """Choose the generation by its tokens."""
        self.layout = PHI_4_MINI if "<|tool|>" in self.controls else PHI_3
        if "<|im_sep|>" in self.controls:
            self.layout = PHI_4

    def opening(self, system: str | None, tools: Sequence[ToolSchema]) -> list[Piece]:
        """The system turn, if there is a system message."""
        if system is None or self.layout.system is None:
            return []
        before, after = self.layout.system
        return [fixed(before), given(system), fixed(after)]
