"""A renderer of ChatML, for tokenizers with <|im_start|> and <|im_end|>."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from posttrain.core.contracts import NoConfig
from posttrain.core.data.turns import Layout, Piece, TurnRenderer, fixed, given
from posttrain.core.errors import ConfigError
from posttrain.core.types import ToolSchema

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Example(TurnRenderer[NoConfig]):
    """tokens = <|im_start|>ROLE, line end, content, <|im_end|>, line end, for each message.

    `TurnRenderer` composes turns from a `layout`, encodes what people bring as plain text, and
    reads turns back; a renderer may also derive from `Renderer` and do all of it itself.
    Source: the format of Qwen2.5's chat template, without tools.
    """

    name = "example"
    Config = NoConfig
    takes_tools: ClassVar[bool] = False
    layout = Layout(
        system=("<|im_start|>system\n", "<|im_end|>\n"),
        user=("<|im_start|>user\n", "<|im_end|>\n"),
        assistant="<|im_start|>assistant\n",
        end="<|im_end|>",
        after="\n",
    )

    def setup(self, tokenizer: PreTrainedTokenizerBase, end_token_ids: Sequence[int]) -> None:
        """Take the tokenizer; refuse one without the format's control tokens."""
        lacking = sorted({"<|im_start|>", "<|im_end|>"} - set(tokenizer.get_vocab()))
        if lacking:
            raise ConfigError(
                f"the renderer '{self.name}' needs the tokens {lacking}, which the tokenizer of "
                f"'{tokenizer.name_or_path}' does not have: choose another renderer"
            )
        super().setup(tokenizer, end_token_ids)

    def opening(self, system: str | None, tools: Sequence[ToolSchema]) -> list[Piece]:
        """The first system message."""
        if system is None:
            return []
        return [fixed("<|im_start|>system\n"), given(system), fixed("<|im_end|>\n")]
