"""Messages to tokens by a model's own chat template, and where the assistant's words stand."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from posttrain.core.contracts import PluginConfig, Rendered, Renderer
from posttrain.core.data.chat import MARK, chat_text_of, own_template, turn_end
from posttrain.core.data.control import ControlTokens
from posttrain.core.data.tool_calls import (
    json_text,
    parse_assistant,
    split_reasoning,
    tool_call_form,
    write_tool_calls,
)
from posttrain.core.errors import DataError
from posttrain.core.types import Message, ToolCall, ToolSchema

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPEAKING = re.compile("tool|python|think|call|args", re.IGNORECASE)
"""Names of special tokens that are a part of what the assistant says."""
DUMMY_ID = "call00000"
"""A call's id of the form that the strictest templates take."""
TOOLS_AS_TEXT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{schemas}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
OTHER_WAY = (
    "set `model.renderer: {name: chat_template, tools_in_system: true}` to write tools and calls "
    "as text, or choose a model whose template has tools"
)


class TemplateConfig(PluginConfig):
    """Settings of `chat_template`."""

    tool_calls: Literal[
        "auto",
        "hermes",
        "qwen_xml",
        "llama3",
        "mistral",
        "mistral_args",
        "glm",
        "deepseek",
        "none",
    ] = Field(
        default="auto",
        description="form in which the model writes tool calls; auto: what its template shows",
    )
    tools_in_system: bool = Field(
        default=False,
        description="write tools in the system message, calls and results as text in Hermes' form, "
        "for models whose template has no tools",
    )


@dataclass(frozen=True, slots=True)
class _Chat:
    """Messages as the template gets them, each with its place among those that were given.

    Control tokens in their texts are placeholders; `back` says for what. With a generation prompt
    either the template writes it (`prompted`), or a last message of the assistant's `goes_on`.
    """

    messages: tuple[Message, ...]
    places: tuple[int, ...]
    tools: tuple[ToolSchema, ...]
    back: Mapping[str, str]
    prompted: bool
    goes_on: bool


@dataclass(frozen=True, slots=True)
class _Part:
    """Characters of a rendered text that belong to a message."""

    start: int
    end: int
    place: int
    sampled: bool


class TemplateRenderer(Renderer[TemplateConfig]):
    """tokens = tokenizer(template(messages, tools)), with the text of messages kept plain.

    An assistant's turn reaches from the end of the generation prompt through the token that ends
    the turn. Its place is found in the whole rendering, by `{% generation %}` where the template
    has it, else by marks at the ends of contents, which must change nothing else, else by the
    renderings of the conversation's beginnings. Where none of them is certain, `DataError`.
    Source: own; the marks of `{% generation %}` are those of transformers.
    """

    Config = TemplateConfig

    def setup(self, tokenizer: PreTrainedTokenizerBase, end_token_ids: Sequence[int]) -> None:
        """Take the tokenizer and what ends a response."""
        super().setup(tokenizer, end_token_ids)
        self.control = ControlTokens(tokenizer, end_token_ids)
        self.has_template = tokenizer.chat_template is not None
        self._tails: dict[str, str | None] = {}
        self._shown: dict[str, bool] = {}

    # --- the contract -----------------------------------------------------------------------------

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        *,
        generation_prompt: bool = False,
    ) -> Rendered:
        """The conversation as the template writes it, with the assistant's turns marked."""
        chat = self._chat(messages, tools, generation_prompt=generation_prompt)
        text = self._whole(chat)
        parts = self._parts(chat, text) if self.has_template else _lines(chat)
        places = [place for part in parts for place in (part.start, part.end)]
        made, moved = self.control.encode(
            text, chat.back, places, add_special_tokens=not self.has_template
        )
        sampled = [False] * len(made.token_ids)
        owners = [-1] * len(made.token_ids)
        bounds = sorted(zip(moved[::2], moved[1::2], parts, strict=True), key=lambda b: b[0])
        at = 0
        for start, end, part in bounds:
            # A token that reaches over the beginning counts: it has the first of what is said.
            while at < len(made.offsets) and made.offsets[at][1] <= start:
                at += 1
            while at < len(made.offsets) and made.offsets[at][0] < end:
                sampled[at], owners[at] = part.sampled, part.place
                at += 1
        return Rendered(made.token_ids, tuple(sampled), tuple(owners))

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()
    ) -> tuple[int, ...]:
        """As `render` with a generation prompt, without looking for the assistant's turns."""
        chat = self._chat(messages, tools, generation_prompt=True)
        made, _ = self.control.encode(
            self._whole(chat), chat.back, add_special_tokens=not self.has_template
        )
        return made.token_ids

    def answer(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()
    ) -> tuple[int, ...]:
        """As in `Renderer`; of a template that writes the last message alone, the content."""
        last = messages[-1]
        plain = self.has_template and not (last.reasoning or last.tool_calls)
        if plain and not self.shows("history"):
            return self.control.encode_content(last)
        return super().answer(messages, tools)

    def apart(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], turn: tuple[int, ...]
    ) -> tuple[int, ...]:
        """The last message where its first token, or the template, joins it to the prompt's end."""
        if not self.has_template:
            return self.control.encode_content(messages[-1])
        chat = self._chat(messages, tools)
        text = self._whole(chat)
        part = next(p for p in reversed(self._parts(chat, text)) if p.place == len(messages) - 1)
        prompt = self._text(chat.messages[:-1], chat.tools, generation_prompt=True)
        if text.startswith(prompt):
            return self._in_the_middle(text[len(prompt) : part.end], chat.back)
        said = self._in_the_middle(text[part.start : part.end], chat.back)
        if not prompt.rstrip().endswith("<think>"):
            return said
        # The prompt begins to reason, the turn does not: what was thought is written and closed.
        thought = messages[-1].reasoning or split_reasoning(messages[-1].content)[0]
        closed = Message("assistant", thought)
        return self.control.encode_content(closed, "\n</think>\n\n") + said

    def extend(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        *,
        ended: bool,
    ) -> tuple[int, ...]:
        """What the template writes after an assistant's turn, of a conversation made for this."""
        if not self.has_template:
            chat = self._chat(messages, tools)
            said = [
                m.content for m, place in zip(chat.messages, chat.places, strict=True) if place >= 0
            ]
            text = "\n" + "\n".join(said) + "\n"
            return self.control.encode(text, chat.back)[0].token_ids
        mark = _unused_mark(messages)
        answers = [m for m in messages if m.role == "tool"]
        calls = tuple(ToolCall(f"{m.name}{mark}", {}, m.tool_call_id) for m in answers)
        turn = Message("assistant", mark, calls)
        try:
            return self._after(turn, messages, tools, ended=ended)
        except DataError:
            if len(calls) < 2:
                raise
            turn = replace(turn, tool_calls=calls[:1])  # some templates take one call a turn
            return self._after(turn, messages, tools, ended=ended)

    def _after(
        self,
        turn: Message,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        *,
        ended: bool,
    ) -> tuple[int, ...]:
        mark, calls = turn.content, turn.tool_calls
        chat = self._chat([Message("user", "Q"), turn, *messages], tools)
        text = self._text(chat.messages, chat.tools, generation_prompt=True)
        place = text.rfind(mark) + len(mark)  # a template with calls may leave the content out
        if place < len(mark):
            raise DataError(self._lost("what follows an assistant's turn"))
        if self._end is None:
            number = next(i for i, m in enumerate(chat.messages) if m.role == "assistant")
            before = self._text(chat.messages[: number + 1], chat.tools) if calls else text[:place]
            if not text.startswith(before):
                raise DataError(self._lost("what follows an assistant's turn"))
            return self.control.encode(text[len(before) :], chat.back)[0].token_ids
        found = self._ends.search(text, place)
        if found is None:
            raise DataError(self._lost("the end of an assistant's turn before other messages"))
        # With the end token in front, so that nothing is taken for the beginning of a text.
        made, _ = self.control.encode(text[found.start() :], chat.back)
        return made.token_ids[1:] if ended else made.token_ids

    def _in_the_middle(self, text: str, back: Mapping[str, str]) -> tuple[int, ...]:
        """The tokens of text that is not the beginning of one: with an end token in front."""
        end = self._end or ""
        return self.control.encode(end + text, back)[0].token_ids[bool(end) :]

    def parse(self, token_ids: Sequence[int], tools: Sequence[ToolSchema] = ()) -> Message:
        """The message that the tokens write, tool calls in the form of the config."""
        # Special tokens are left out, but those that tell calls and reasoning from other text.
        speaking = {i for name, i in self.control.ids.items() if SPEAKING.search(name)}
        hidden = set(self.tokenizer.all_special_ids) - speaking | set(self.end_token_ids)
        own = [token for token in token_ids if token not in hidden]
        text = str(self.tokenizer.decode(own, skip_special_tokens=False))
        opened = (self._tail("user") or "").rstrip().endswith("<think>")
        return parse_assistant(text.removeprefix(self._lead), self.form, opened=opened, tools=tools)

    @cached_property
    def _lead(self) -> str:
        """Blanks that the template writes between the generation prompt and a content."""
        chat = [Message("user", "Q"), Message("assistant", MARK)]
        text = self._shown_text(chat)
        prompt = self._shown_text(chat[:1], generation_prompt=True)
        if text is None or prompt is None:
            return ""
        before = text.partition(MARK)[0]
        lead = before[len(prompt) :] if before.startswith(prompt) else ""
        return "" if lead.strip() else lead

    @cached_property
    def form(self) -> str:
        """The form in which the model writes tool calls."""
        if self.config.tool_calls != "auto":
            return self.config.tool_calls
        if self.config.tools_in_system:
            return "hermes"
        return tool_call_form(str(self.tokenizer.chat_template or ""))

    # --- messages as the template takes them ------------------------------------------------------

    def _chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        *,
        generation_prompt: bool = False,
    ) -> _Chat:
        if not messages:
            raise DataError("a conversation without messages: give at least one")
        plain, schemas, back = self.control.protect(messages, tools)
        pairs = list(enumerate(plain))
        if self.config.tools_in_system:
            pairs, schemas = _as_text(pairs, schemas), []
        elif schemas and not self.shows("tools"):
            raise DataError(f"the model's chat template has no tools: {OTHER_WAY}")
        elif not self.shows("calls") and any(m.tool_calls for m in plain):
            raise DataError(f"the model's chat template leaves tool calls out: {OTHER_WAY}")
        elif not self.shows("results") and any(m.role == "tool" for m in plain):
            raise DataError(f"the model's chat template has no messages of tools: {OTHER_WAY}")
        if any(m.reasoning for m in plain) and not self.shows("reasoning"):
            # A template may also take reasoning out of contents: then it wants none.
            shown = not self.has_template or self.shows("inline")
            pairs = [
                (i, _thought_first(m) if shown else replace(m, reasoning="")) for i, m in pairs
            ]
        if self.has_template and pairs[0][1].role == "system" and not self.shows("system"):
            pairs = _without_system(pairs)
        places, made = zip(*pairs, strict=True)
        is_own = made[-1].role == "assistant"
        return _Chat(
            made,
            places,
            tuple(schemas),
            back,
            prompted=generation_prompt and not is_own,
            goes_on=generation_prompt and is_own,
        )

    def shows(self, what: str) -> bool:
        """Whether the template writes system messages, tools, calls, results, reasoning, history.

        Some templates refuse what they have no place for, others leave it out.
        """
        if what not in self._shown:
            user, call = Message("user", "Q"), ToolCall("f", {"x": 1}, DUMMY_ID)
            schema = {
                "type": "function",
                "function": {
                    "name": MARK,
                    "description": "d",
                    "parameters": {"type": "object", "properties": {}},
                },
            }
            chat = {
                "system": [Message("system", MARK), user],
                "history": [Message("user", MARK), Message("assistant", "A")],
                "tools": [user],
                "calls": [user, Message("assistant", "", (replace(call, name=MARK),))],
                "results": [
                    user,
                    Message("assistant", "", (call,)),
                    Message("tool", MARK, name="f", tool_call_id=DUMMY_ID),
                ],
                "reasoning": [user, Message("assistant", "A", reasoning=MARK)],
                "inline": [user, _thought_first(Message("assistant", "A", reasoning=MARK))],
            }[what]
            if what == "results" and not self.shows("calls"):
                chat[1] = Message("assistant", "A")
            tools = [schema] if what == "tools" else []
            text = self._shown_text(chat, tools, generation_prompt=what == "system") or ""
            self._shown[what] = MARK in text
        return self._shown[what]

    def _text(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        *,
        generation_prompt: bool = False,
    ) -> str:
        return chat_text_of(self.tokenizer, messages, tools, generation_prompt=generation_prompt)

    def _shown_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        *,
        generation_prompt: bool = False,
    ) -> str | None:
        """As `_text`; None where the template refuses the messages."""
        return own_template(self.tokenizer, messages, tools, generation_prompt=generation_prompt)

    def _whole(self, chat: _Chat) -> str:
        last = chat.messages[-1]
        if not self.has_template:
            return "\n".join(m.content for m in chat.messages) + ("\n" if chat.prompted else "")
        if not chat.goes_on:
            return self._text(chat.messages, chat.tools, generation_prompt=chat.prompted)
        if last.tool_calls:
            raise DataError(
                "the last message is the assistant's and calls tools, so it cannot be continued: "
                "end the prompt with the tools' messages"
            )
        # The content is written as it is, even if the template strips or rewrites contents.
        marked = [*chat.messages[:-1], replace(last, content=MARK)]
        before, found, _ = self._text(marked, chat.tools).rpartition(MARK)
        if not found:
            raise DataError(
                "the model's chat template leaves the last assistant's message out, so it cannot "
                "be continued: end the prompt with the user's message, or choose a model with "
                "another template"
            )
        return before + last.content

    # --- where messages stand ---------------------------------------------------------------------

    def _parts(self, chat: _Chat, text: str) -> list[_Part]:
        """The places of assistants' turns and of other messages' contents in the rendered text."""
        marks = self._marks(chat, text)
        turns = self._generation_turns(chat, text, marks)
        parts = [] if turns is None else turns
        for i, message in enumerate(chat.messages):
            if message.role != "assistant":
                parts += _content(message, text, marks.get(i), chat.places[i])
            elif turns is None:
                last = chat.goes_on and i == len(chat.messages) - 1
                start = self._start(chat, text, marks, i)
                end = len(text) if last else self._end_of(chat, text, marks, i, start)
                parts.append(_Part(start, end, chat.places[i], True))
        parts.sort(key=lambda part: part.start)
        for one, two in zip(parts, parts[1:], strict=False):
            if one.end > two.start:
                raise DataError(self._lost("the messages"))
        return parts

    def _marks(self, chat: _Chat, text: str) -> dict[int, int]:
        """Where each message's content ends in `text`, without blanks that follow it.

        {} when the marks change what else the template writes. The mark of a message without
        content is at its last call's name, or at its reasoning.
        """
        for fits in (lambda content: True, bool, str.strip):
            if found := self._marks_where(fits, chat, text):
                return found
        return {}

    def _marks_where(self, fits: Callable[[str], object], chat: _Chat, text: str) -> dict[int, int]:
        """As `_marks`, with marks in contents that fit: a template may test for empty ones."""
        base = _unused_mark(chat.messages)
        marks = [f"{base}{i}End" for i in range(len(chat.messages))]
        marked = [_marked(m, mark, fits) for m, mark in zip(chat.messages, marks, strict=True)]
        if chat.goes_on:
            marked[-1] = replace(chat.messages[-1], content=marks[-1])
        found = self._shown_text(marked, chat.tools, generation_prompt=chat.prompted)
        if found is None:
            return {}
        if chat.goes_on:
            found = found[: found.rfind(marks[-1])] + chat.messages[-1].content + marks[-1]
        either = re.compile(rf"{base}(\d+)End")
        ends: dict[int, int] = {}
        removed = 0
        for mark in either.finditer(found):
            i = int(mark[1])
            if i in ends:  # written twice: the place is not known
                return {}
            ends[i] = mark.start() - removed
            removed += len(mark[0])
        if either.sub("", found) != text or list(ends.values()) != sorted(ends.values()):
            return {}
        return ends

    def _start(self, chat: _Chat, text: str, marks: Mapping[int, int], i: int) -> int:
        """Where the assistant's message `i` begins: after the generation prompt."""
        before = marks.get(i - 1)
        tail = self._tail(chat.messages[i - 1].role) if i else None
        if before is not None and tail is not None:
            blanks = _blanks_after(chat.messages[i - 1].content)
            for between in (tail, blanks + tail):
                if text.startswith(between, before):
                    return before + len(between)
        if i:
            prompt = self._shown_text(chat.messages[:i], chat.tools, generation_prompt=True)
            if prompt is not None and text.startswith(prompt):
                return len(prompt)
        message, end = chat.messages[i], marks.get(i)
        if end is not None and (before is not None or not i):
            opening = self._opening
            at = text.find(opening, before or 0, end) if opening else -1
            if at >= 0:
                return at + len(opening)
            said = message.content.rstrip()
            said = said if text[:end].endswith(said) else said.lstrip()
            if said and not message.reasoning and text[:end].endswith(said):
                return end - len(said)
        raise DataError(self._lost(f"the assistant's message {chat.places[i]}"))

    def _end_of(self, chat: _Chat, text: str, marks: Mapping[int, int], i: int, start: int) -> int:
        """Where the assistant's message `i` ends: after the token that ends the turn."""
        message, last = chat.messages[i], i == len(chat.messages) - 1
        known = marks.get(i)
        if known is None and (message.content.strip() or message.tool_calls or message.reasoning):
            begin, end = start, self._difference(chat, text, i)
            ends = list(self._ends.finditer(text, begin, end)) if self._end is not None else []
            return ends[-1].end() if ends else end
        begin = start if known is None else known
        if self._end is not None:
            found = self._ends.search(text, begin)
            following = marks.get(i + 1, len(text))
            if found is not None and found.end() <= following:
                return found.end()
        if last and text == self._text(chat.messages, chat.tools):
            return len(text) - len(self._begun)
        try:
            return self._difference(chat, text, i)
        except DataError:
            if self._end is not None or known is None or message.tool_calls:
                raise
            return known  # without an end, the content is the end

    def _difference(self, chat: _Chat, text: str, i: int) -> int:
        """Length of the rendering through message `i`, a prefix of `text`."""
        upto = self._text(chat.messages[: i + 1], chat.tools)
        if not text.startswith(upto):
            raise DataError(self._lost(f"the assistant's message {chat.places[i]}"))
        return len(upto)

    def _generation_turns(
        self, chat: _Chat, text: str, marks: Mapping[int, int]
    ) -> list[_Part] | None:
        """The assistant's turns as the template itself marks them; None when it does not."""
        template = str(self.tokenizer.chat_template)
        if not re.search(r"\{%-?\s*generation\s*-?%\}", template):
            return None
        found: list[tuple[int, int]] = []
        rendered = chat_text_of(
            self.tokenizer,
            chat.messages,
            chat.tools,
            generation_prompt=chat.prompted,
            turns=found,
        )
        own = [i for i, m in enumerate(chat.messages) if m.role == "assistant"]
        if rendered != text:  # the last message is continued: it has no end yet
            found = [(start, min(end, len(text))) for start, end in found if start <= len(text)]
        found = [self._own_words(text, start, end) for start, end in found if end > start]
        if len(found) == len(own):
            owners = own
        else:
            at = [next((i for i in own if marks.get(i, -1) >= start), None) for start, _ in found]
            if None in at:
                raise DataError(self._lost("the assistant's messages"))
            owners = [i for i in at if i is not None]
        return [
            _Part(start, end, chat.places[i], True)
            for (start, end), i in zip(found, owners, strict=True)
        ]

    def _own_words(self, text: str, start: int, end: int) -> tuple[int, int]:
        """A span of `{% generation %}` without the generation prompt, and what follows the end."""
        for opening in filter(None, (self._opening, self._opening.partition("<think>")[0])):
            if text.startswith(opening, start, end):
                start += len(opening)
                break
        ends = list(self._ends.finditer(text, start, end))
        if ends and not text[ends[-1].end() : end].strip():
            end = ends[-1].end()
        return start, end

    def _tail(self, role: str) -> str | None:
        """What the template writes after a message of `role`, up to the assistant's words."""
        if role not in self._tails:
            user = Message("user", "Q")
            call = Message("assistant", "", (ToolCall("f", {}, DUMMY_ID),))
            chats = {
                "user": [Message("user", MARK)],
                "system": [Message("system", MARK)],
                "assistant": [user, Message("assistant", MARK)],
                "tool": [user, call, Message("tool", MARK, name="f", tool_call_id=DUMMY_ID)],
            }
            text = self._shown_text(chats[role], generation_prompt=True) or ""
            _, found, after = text.rpartition(MARK)
            self._tails[role] = after if found else None
        return self._tails[role]

    @cached_property
    def _opening(self) -> str:
        """The generation prompt."""
        user = [Message("user", "Q")]
        bare, prompt = self._shown_text(user), self._shown_text(user, generation_prompt=True)
        if bare is None or prompt is None or not prompt.startswith(bare):
            return ""
        return prompt[len(bare) :]

    @cached_property
    def _begun(self) -> str:
        """What a template without ends writes of a next turn, although nobody asked for it."""
        chat = [Message("user", "Q"), Message("assistant", MARK)]
        last, followed = (self._shown_text(c) or "" for c in (chat, [*chat, Message("user", "Q")]))
        after = last.partition(MARK)[2]
        if followed.partition(MARK)[2].startswith(after):
            return ""
        return after.lstrip() if self._shown_text(chat, generation_prompt=True) == last else ""

    @cached_property
    def _end(self) -> str | None:
        """The name of the token with which the template ends a turn."""
        found = turn_end(self.tokenizer)
        return None if found is None else str(self.tokenizer.convert_ids_to_tokens(found.token))

    @cached_property
    def _ends(self) -> re.Pattern[str]:
        names = {n for n, i in self.control.ids.items() if i in self.end_token_ids}
        names |= {self._end} if self._end is not None else set()
        return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or r"(?!)")

    def _lost(self, what: str) -> str:
        return (
            f"{what} cannot be found in what the model's chat template writes, so no loss mask is "
            "certain: mark the assistant's turns in the template with {% generation %}, choose the "
            "renderer of the model's family (`model.renderer`), or correct the messages"
        )


def _blanks_after(content: str) -> str:
    return content[len(content.rstrip()) :]


def _content(message: Message, text: str, end: int | None, place: int) -> list[_Part]:
    """The place of a content that ends at `end`, but for blanks, if the template writes it."""
    content = message.content.rstrip()
    for said in (content, content.lstrip()):
        if end is not None and said and text[:end].endswith(said):
            blanks = _blanks_after(message.content)
            size = len(blanks) if text.startswith(blanks, end) else 0
            return [_Part(end - len(said), end + size, place, False)]
    return []


def _unused_mark(messages: Sequence[Message]) -> str:
    """A mark that no message holds."""
    said, mark = repr(messages), MARK
    while mark in said:
        mark += "Too"
    return mark


def _marked(message: Message, mark: str, fits: Callable[[str], object]) -> Message:
    """The message with a mark at its end, before blanks, which a template may strip."""
    if fits(message.content) and (message.content or not message.tool_calls):
        return replace(message, content=_before_blanks(message.content, mark))
    if message.tool_calls:
        *others, call = message.tool_calls
        return replace(message, tool_calls=(*others, replace(call, name=call.name + mark)))
    if message.reasoning.strip():
        return replace(message, reasoning=_before_blanks(message.reasoning, mark))
    return message


def _before_blanks(text: str, mark: str) -> str:
    return text.rstrip() + mark + _blanks_after(text)


def _lines(chat: _Chat) -> list[_Part]:
    """The places of messages that are written a line each."""
    parts, at = [], 0
    for place, message in zip(chat.places, chat.messages, strict=True):
        own = message.role == "assistant"
        parts.append(_Part(at, at + len(message.content), place, own))
        at += len(message.content) + 1
    return parts


def _thought_first(message: Message) -> Message:
    """The message with its reasoning in its content, for templates that have no place for it."""
    if not message.reasoning:
        return message
    content = f"<think>\n{message.reasoning}\n</think>\n\n{message.content}"
    return replace(message, content=content, reasoning="")


def _without_system(pairs: list[tuple[int, Message]]) -> list[tuple[int, Message]]:
    """The messages with the leading system message put in front of the user's first."""
    (place, system), *rest = pairs
    if not rest or rest[0][1].role != "user":
        return [(place, replace(system, role="user")), *rest]
    index, user = rest[0]
    return [(index, replace(user, content=f"{system.content}\n\n{user.content}")), *rest[1:]]


def _as_text(
    pairs: list[tuple[int, Message]], tools: Sequence[ToolSchema]
) -> list[tuple[int, Message]]:
    """Tools, calls and results as text in Hermes' form, for templates without them."""
    made: list[tuple[int, Message]] = []
    for place, message in pairs:
        if message.role == "tool":
            content = f"<tool_response>\n{message.content}\n</tool_response>"
            if place and pairs[place - 1][1].role == "tool":
                content = f"{made.pop()[1].content}\n{content}"
            made.append((place, Message("user", content)))
            continue
        calls = write_tool_calls(message.tool_calls, "hermes")
        said = "\n".join(filter(None, (message.content, calls)))
        made.append((place, replace(message, content=said, tool_calls=())))
    if tools:
        text = TOOLS_AS_TEXT.format(schemas="\n".join(map(json_text, tools)))
        if made[0][1].role == "system":
            place, system = made[0]
            made[0] = (place, replace(system, content=f"{system.content}\n\n{text}"))
        else:
            made.insert(0, (-1, Message("system", text)))
    return made
