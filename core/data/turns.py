"""Renderers of known families of models: conversations composed of turns, token by token.

Text between control tokens is encoded as the family's own chat template would have it encoded, but
control tokens come from the format alone: their names in text of users, tools and schemas are plain
text. A turn ends where no later message can change its tokens.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from posttrain.core.contracts import ConfigT, Rendered, Renderer
from posttrain.core.data.control import ControlTokens
from posttrain.core.data.tool_calls import (
    ARGS,
    CALL_BEGIN,
    CALL_END,
    CALL_ID,
    CALL_SEP,
    CALLS_BEGIN,
    CALLS_END,
    CLOSE,
    OPEN,
    PYTHON_TAG,
    THINK,
    TOOL_CALLS,
    json_text,
    parse_assistant,
    split_reasoning,
    write_tool_calls,
)
from posttrain.core.errors import ConfigError, DataError
from posttrain.core.types import Message, ToolSchema

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FAMILIES: dict[str, tuple[tuple[str, ...], ...]] = {
    "chatml": (("<|im_start|>", "<|im_end|>"),),
    "qwen3": (("<|im_start|>", "<|im_end|>", "<think>", "</think>", OPEN, CLOSE),),
    "llama3": (("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),),
    "mistral": (("[INST]", "[/INST]", "</s>"),),
    "gemma": (("<start_of_turn>", "<end_of_turn>"),),
    "glm4": (
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
        + ("<think>", "</think>", OPEN, CLOSE),
    ),
    "deepseek": (("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),),
    "phi": (
        ("<|im_start|>", "<|im_sep|>", "<|im_end|>"),
        ("<|user|>", "<|assistant|>", "<|end|>"),
    ),
}
"""Control tokens that a tokenizer of each family has, in one of these sets."""

TAGS = frozenset(
    (*THINK[0], *THINK[1], OPEN, CLOSE, PYTHON_TAG, TOOL_CALLS, ARGS, CALL_ID)
    + (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_SEP, CALL_END)
    + ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
)
"""Control tokens with which assistants mark reasoning and calls, also in text of data sets."""

ANY_TAG = re.compile(f"({'|'.join(map(re.escape, sorted(TAGS)))})")


class Piece(NamedTuple):
    """A part of a turn's text, and who wrote it."""

    text: str
    by: Literal["format", "assistant", "people"]


def fixed(text: str) -> Piece:
    """Text of the format: names of control tokens in it are these tokens."""
    return Piece(text, "format")


def said(text: str) -> Piece:
    """Text of an assistant: `TAGS` in it are control tokens, others are not."""
    return Piece(text, "assistant")


def given(text: str) -> Piece:
    """Text of users, tools and schemas: there are no control tokens in it."""
    return Piece(text, "people")


class Chunk(NamedTuple):
    """Text that is encoded at once. `before` is text that stands before it, encoded already."""

    message: int
    pieces: Sequence[Piece]
    sampled: bool = False
    before: str = ""


@dataclass(frozen=True, slots=True)
class Layout:
    """What a family writes around its messages; pairs are the text before and after a content.

    `end` is the token that ends an assistant's turn, and `after` the text that follows it. The
    results of one turn's calls are a group: `results_open`, each result within `result`, joined by
    `results_join`, and `results_close`. Without `system` only a first system message can be held.
    """

    user: tuple[str, str]
    assistant: str
    end: str
    after: str = ""
    system: tuple[str, str] | None = None
    results_open: str = ""
    result: tuple[str, str] = ("", "")
    results_join: str = ""
    results_close: str = ""
    trim: bool = False


class TurnRenderer(Renderer[ConfigT]):
    """A family's format as data: a `layout`, the form of its tool calls, and how it opens."""

    form: str = "none"
    call_gap: ClassVar[str] = ""
    """Text between an assistant's content and its calls."""
    think: tuple[str, str] = ("<think>\n", "\n</think>\n\n")
    always_think: bool = False
    """Whether turns without reasoning have an empty block of it."""
    begins_in_reasoning: bool = False
    """Whether the format, not the model, begins the block of reasoning."""
    layout: Layout

    # --- what a family says -------------------------------------------------------------------

    def adapt(self) -> None:
        """Choose `layout` and the rest by the tokenizer, whose control tokens are `controls`."""

    @abstractmethod
    def opening(self, system: str | None, tools: Sequence[ToolSchema]) -> list[Piece]:
        """What stands before the first turn, with the first system message."""

    def first_user(
        self, system: str | None, tools: Sequence[ToolSchema]
    ) -> tuple[list[Piece], list[Piece]]:
        """What stands before the user's first turn, and before the content in it."""
        return [], []

    def end_of(self, message: Message) -> str:
        """The token that ends this turn of the assistant's."""
        return self.layout.end

    def header(self, after_results: bool) -> str:
        """What begins an assistant's turn."""
        return self.layout.assistant

    def result_text(self, message: Message, place: int) -> list[Piece]:
        """A tool's message within its `result`; `place` counts the group's results from 0."""
        return [given(message.content)]

    def calls_text(self, message: Message) -> str:
        """The message's calls."""
        return write_tool_calls(message.tool_calls, self.form)

    def body(self, message: Message, *, is_open: bool) -> str:
        """What the model writes in a turn, without the turn's end; `is_open` if it is continued."""
        reasoning, content = message.reasoning, message.content
        if self.always_think and not reasoning and content.lstrip().startswith("<think>"):
            reasoning, content = split_reasoning(content)
        if self.layout.trim:
            content = content.lstrip() if is_open else content.strip()
        begin, close = self.think
        text = content
        if reasoning or self.always_think:
            text = ("" if self.begins_in_reasoning else begin) + reasoning
            only_reasoning = is_open and not (content or message.tool_calls)
            text += "" if only_reasoning else close + content
        calls = self.calls_text(message)
        calls += ("\n" if calls and message.malformed else "") + "\n".join(message.malformed)
        has_gap = not (calls and content) or calls.startswith(self.call_gap)
        return text + ("" if has_gap else self.call_gap) + calls

    # --- the contract -------------------------------------------------------------------------

    def setup(self, tokenizer: PreTrainedTokenizerBase, end_token_ids: Sequence[int]) -> None:
        """Take the tokenizer; refuse one without the family's control tokens."""
        super().setup(tokenizer, end_token_ids)
        wanted = FAMILIES.get(self.name, ((),))
        self.control = ControlTokens(tokenizer, end_token_ids, TAGS.union(*wanted))
        self.controls = self.control.ids
        self._names = re.compile("|".join(map(re.escape, self.controls)) or r"(?!)")
        lacking = min(([n for n in names if n not in self.controls] for names in wanted), key=len)
        if lacking:
            raise ConfigError(
                f"the renderer '{self.name}' does not fit the tokenizer of "
                f"'{tokenizer.name_or_path}', which lacks the control tokens "
                f"{', '.join(lacking)}: set model.renderer to '{fitting(self.controls)}'"
            )
        self._fixed: dict[str, tuple[int, ...]] = {}
        self.adapt()
        ends = {self.end_of(message) for message in (Message("assistant"), CALLING)}
        self.end_token_ids = tuple(
            sorted({*end_token_ids, *(self.controls[name] for name in ends)})
        )

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        *,
        generation_prompt: bool = False,
    ) -> Rendered:
        """The conversation, composed of its turns."""
        self._check(messages, tools)
        has_system = bool(messages) and messages[0].role == "system"
        system = messages[0].content if has_system else None
        chunks = [Chunk(0 if has_system else -1, self.opening(system, tools))]
        lead = self.first_user(system, tools)
        first = int(has_system)
        if any(lead) and len(messages) > first and messages[first].role != "user":
            raise DataError(
                f"the format of '{self.name}' puts the system message and the tools into the "
                f"user's first message, but the first message is of role {messages[first].role}: "
                "begin the conversation with a user's message"
            )
        chunks += self._turns(messages, first, generation_prompt, lead)
        return self._encoded(chunks)

    def extend(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        *,
        ended: bool,
    ) -> tuple[int, ...]:
        """The end of the assistant's turn, the new messages, and the beginning of its next turn."""
        self._check(messages, ())
        end = "" if ended else self._end_before(messages)
        between = Chunk(-1, [fixed(end + self.layout.after)], before="" if end else self.layout.end)
        turns = self._turns(messages, 0, True, ([], []), after_assistant=True)
        return self._encoded([between, *turns]).token_ids

    def parse(self, token_ids: Sequence[int], tools: Sequence[ToolSchema] = ()) -> Message:
        """The message of one turn, up to the token that ends it."""
        known = len(self.tokenizer)
        ids = []
        for token in token_ids:
            if token in self.end_token_ids:
                break
            if 0 <= token < known:
                ids.append(token)
        text = self.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return parse_assistant(str(text), self.form, opened=self.begins_in_reasoning, tools=tools)

    # --- turns to chunks ----------------------------------------------------------------------

    def _check(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> None:
        if not self.takes_tools and (
            tools or any(m.role == "tool" or m.tool_calls or m.malformed for m in messages)
        ):
            raise DataError(
                f"the format of '{self.name}' has no tools, but the conversation has tools or "
                "tool calls: remove them, or choose a model whose chat template takes tools"
            )
        late = [i for i, message in enumerate(messages) if i and message.role == "system"]
        if late and self.layout.system is None:
            raise DataError(
                f"the format of '{self.name}' holds a system message only as the first one, but "
                f"message {late[0]} is one: put its text into a user's message"
            )

    def _end_before(self, messages: Sequence[Message]) -> str:
        """The end of a turn that was cut, by what follows it."""
        called = bool(messages) and messages[0].role == "tool"
        return self.end_of(CALLING if called else Message("assistant"))

    def _turns(
        self,
        messages: Sequence[Message],
        first: int,
        generation_prompt: bool,
        lead: tuple[list[Piece], list[Piece]],
        after_assistant: bool = False,
    ) -> list[Chunk]:
        chunks: list[Chunk] = []
        results = 0  # of the group that is open
        end = self._end_before(messages) if after_assistant else ""
        for i in range(first, len(messages)):
            message = messages[i]
            if results and message.role != "tool":
                chunks.append(Chunk(i - 1, [fixed(self._results_close)]))
            if message.role == "assistant":
                is_open = generation_prompt and i == len(messages) - 1
                end = "" if is_open else self.end_of(message)
                chunks += self._assistant(i, message, end, self.header(results > 0))
                results = 0
                continue
            pieces = self._others(message, results, lead)
            if message.role == "user":
                lead = ([], [])
            if self.shared_end and end and pieces[0].text.startswith(end):
                pieces = [fixed(pieces[0].text.removeprefix(end)), *pieces[1:]]
            results, end = (results + 1 if message.role == "tool" else 0), ""
            chunks.append(Chunk(i, pieces))
        if generation_prompt and (not messages or messages[-1].role != "assistant"):
            if results:
                chunks.append(Chunk(len(messages) - 1, [fixed(self._results_close)]))
            chunks.append(Chunk(-1, [fixed(self.header(results > 0))]))
        return chunks

    def _assistant(self, i: int, message: Message, end: str, header: str) -> list[Chunk]:
        body = self.body(message, is_open=not end)
        chunks = [
            Chunk(i, [fixed(header)]),
            Chunk(i, [said(body), fixed(end)], sampled=True, before=header),
        ]
        return [*chunks, Chunk(i, [fixed(self.layout.after)], before=end)] if end else chunks

    def _others(
        self, message: Message, results: int, lead: tuple[list[Piece], list[Piece]]
    ) -> list[Piece]:
        """The turn of a user or system message, or one result of a group."""
        layout = self.layout
        if message.role == "tool":
            begin = self._result_tail + layout.results_join if results else layout.results_open
            close = layout.result[1].removesuffix(self._result_tail)
            content = self.result_text(message, results)
            return [fixed(begin + layout.result[0]), *content, fixed(close)]
        content_text = message.content.strip() if layout.trim else message.content
        if message.role == "system":
            assert layout.system is not None
            begin, close = layout.system
            return [fixed(begin), given(content_text), fixed(close)]
        turn, inside = lead
        return [*turn, fixed(layout.user[0]), *inside, given(content_text), fixed(layout.user[1])]

    @property
    def _result_tail(self) -> str:
        """The last of a result that is written with what follows it, to be encoded with that."""
        tail = self.layout.result[1].rpartition("\n")[2]
        return "" if tail in self.controls else tail

    @property
    def _results_close(self) -> str:
        return self._result_tail + self.layout.results_close

    # --- chunks to tokens ---------------------------------------------------------------------

    def _encoded(self, chunks: Iterable[Chunk]) -> Rendered:
        ids: list[int] = []
        sampled: list[bool] = []
        message: list[int] = []
        for chunk in chunks:
            own = self._encode(chunk)
            ids += own
            sampled += [chunk.sampled] * len(own)
            message += [chunk.message] * len(own)
        return Rendered(tuple(ids), tuple(sampled), tuple(message))

    def _encode(self, chunk: Chunk) -> tuple[int, ...]:
        text = "".join(piece.text for piece in chunk.pieces)
        if not text:
            return ()
        if all(piece.by == "format" for piece in chunk.pieces):
            key = f"{chunk.before}\0{text}"
            if key not in self._fixed:
                self._fixed[key] = self._after(chunk.before, text, {})
            return self._fixed[key]
        if not any(self._names.search(p.text) for p in chunk.pieces if p.by != "format"):
            return self._after(chunk.before, text, {})
        parts = [part for piece in chunk.pieces for part in _by_format(piece)]
        plain = [Message("user", text) for text, is_format in parts if not is_format]
        kept, _, back = self.control.protect(plain, ())
        safe = iter(kept)
        text = "".join(part if is_format else next(safe).content for part, is_format in parts)
        return self._after(chunk.before, text, back)

    def _after(self, before: str, text: str, back: Mapping[str, str]) -> tuple[int, ...]:
        """The text's ids where `before` stands before it, whose own ids are what they are."""
        ids = self._ids(before + text, back)
        if before:
            known = self._encode(Chunk(-1, [fixed(before)]))
            begins = ids[: len(known)] == known
            ids = ids[len(known) :] if begins else self._ids(text, back)
        return ids

    def _ids(self, text: str, back: Mapping[str, str]) -> tuple[int, ...]:
        if back:
            return self.control.encode(text, back)[0].token_ids
        return tuple(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


CALLING = Message("assistant", malformed=("call",))
"""A message that ends as those with calls do."""


def fitting(controls: Iterable[str]) -> str:
    """The family with the most control tokens, all of which are among `controls`."""
    known = set(controls)
    sizes = {
        name: max((len(names) for names in sets if known.issuperset(names)), default=0)
        for name, sets in FAMILIES.items()
    }
    best = max(sizes, key=sizes.__getitem__)
    return best if sizes[best] else "chat_template"


def schema_lines(tools: Sequence[ToolSchema]) -> str:
    """The tools as JSON, a line each."""
    return "\n".join(json_text(tool) for tool in tools)


def _by_format(piece: Piece) -> list[tuple[str, bool]]:
    """The parts of a piece, and of each whether control tokens in it are control tokens."""
    if piece.by != "assistant":
        return [(piece.text, piece.by == "format")]
    return [(part, part in TAGS) for part in ANY_TAG.split(piece.text) if part]
