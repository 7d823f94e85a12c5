"""How messages become tokens, and tokens become messages again."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, ClassVar

from posttrain.core.contracts.base import ConfigT, Plugin
from posttrain.core.types import Message, ToolSchema

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as tokens, all tuples of one length.

    `sampled` says of each token whether an assistant wrote it: its reasoning, content and tool
    calls, and the token that ends its turn; never what the template puts around them. `message` is
    the index of the message that each token belongs to, -1 for none.
    """

    token_ids: tuple[int, ...]
    sampled: tuple[bool, ...]
    message: tuple[int, ...]


class Renderer(Plugin[ConfigT]):
    """Messages to tokens and back, for the models of one family or for any.

    Tokens of text that users, tools and schemas bring are never control tokens, whatever it says.
    Appending messages never changes a token that stands before them: `extend` continues the tokens
    themselves, so what was sampled is never rendered again.
    """

    kind = "renderer"
    takes_tools: ClassVar[bool] = True
    shared_end: ClassVar[bool] = False
    """Whether an assistant's turn ends with the token that begins the turn after it."""

    def setup(self, tokenizer: PreTrainedTokenizerBase, end_token_ids: Sequence[int]) -> None:
        """Take the model's tokenizer; `end_token_ids` are all tokens that end a response.

        Raises `ConfigError` when the renderer does not fit the tokenizer.
        """
        self.tokenizer = tokenizer
        self.end_token_ids = tuple(end_token_ids)

    @abstractmethod
    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        *,
        generation_prompt: bool = False,
    ) -> Rendered:
        """The conversation; with `generation_prompt`, up to where the assistant's words begin.

        A last message of the assistant's is continued when `generation_prompt` is set: its turn is
        left open. Raises `DataError` for messages that the model's format cannot hold.
        """

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()
    ) -> tuple[int, ...]:
        """The tokens of `render` with a generation prompt, where nobody asks for the mask."""
        return self.render(messages, tools, generation_prompt=True).token_ids

    def answer(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()
    ) -> tuple[int, ...]:
        """The tokens of the last message, an assistant's, as they follow `prompt` of the others.

        With all that the format writes from there to the turn's end, so that one answer is the same
        in a conversation, in a pair and after a prompt.
        """
        before = messages[:-1]
        begun, made = self.prompt(before, tools), self.render(messages, tools)
        rows = enumerate(zip(made.sampled, made.message, strict=True))
        own = [place for place, (sampled, m) in rows if sampled and m == len(before)]
        if not own:
            return ()
        if made.token_ids[: len(begun)] != begun:
            return self.apart(messages, tools, made.token_ids[own[0] : own[-1] + 1])
        return made.token_ids[len(begun) : own[-1] + 1]

    def apart(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], turn: tuple[int, ...]
    ) -> tuple[int, ...]:
        """The last message, whose `turn` in the conversation stands after other tokens than those
        of the prompt, as it follows the prompt."""
        return turn

    @abstractmethod
    def extend(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        *,
        ended: bool,
    ) -> tuple[int, ...]:
        """Tokens that follow an assistant's turn: its end unless it `ended`, the new `messages`
        (of tools or the user), and the beginning of the assistant's next turn.

        They depend on nothing before them, so that `prefix + extend(...)` keeps every token of the
        prefix.
        """

    @abstractmethod
    def parse(self, token_ids: Sequence[int], tools: Sequence[ToolSchema] = ()) -> Message:
        """The assistant's message that `token_ids` (one turn, with or without its end) write.

        Text, reasoning and tool calls; a call that cannot be read stands in `malformed`. `tools`
        are those that the model was shown: a format that writes strings without quotes reads each
        argument by its schema. A renderer whose calls are JSON may leave the argument out: then it
        is called without. Never raises on any tokens.
        """

    def parse_turn(self, token_ids: Sequence[int], tools: Sequence[ToolSchema]) -> Message:
        """`parse`, with `tools` if this renderer takes them."""
        given = signature(self.parse).parameters.values()
        takes = any(p.name == "tools" or p.kind is p.VAR_KEYWORD for p in given)
        return self.parse(token_ids, tools=tools) if takes else self.parse(token_ids)
