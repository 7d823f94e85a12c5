"""Where the assistant's turns, and other messages' contents, stand in what a template wrote."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from posttrain.core.data.chat import MARK, chat_text_of
from posttrain.core.data.template_facts import TemplateFacts
from posttrain.core.data.template_messages import Chat
from posttrain.core.errors import DataError
from posttrain.core.types import Message


@dataclass(frozen=True, slots=True)
class Part:
    """Characters of a rendered text that belong to a message."""

    start: int
    end: int
    place: int
    sampled: bool


def lines_of(chat: Chat) -> list[Part]:
    """The places of messages that are written a line each."""
    parts, at = [], 0
    for place, message in zip(chat.places, chat.messages, strict=True):
        own = message.role == "assistant"
        parts.append(Part(at, at + len(message.content), place, own))
        at += len(message.content) + 1
    return parts


def not_found(what: str) -> DataError:
    """For what no loss mask is certain of."""
    return DataError(
        f"{what} cannot be found in what the model's chat template writes, so no loss mask is "
        "certain: mark the assistant's turns in the template with {% generation %}, choose the "
        "renderer of the model's family (`model.renderer`), or correct the messages"
    )


class Places:
    """The messages of `chat` in `text`, which the template wrote of them.

    `marks` has where each message's content ends, without blanks that follow it; it is empty when
    marks change what else the template writes. The mark of a message without content is at its last
    call's name, or at its reasoning.
    """

    def __init__(self, facts: TemplateFacts, chat: Chat, text: str) -> None:
        self.facts, self.chat, self.text = facts, chat, text
        fitting: tuple[Callable[[str], object], ...] = (lambda content: True, bool, str.strip)
        self.marks = next(filter(None, map(self._marks_where, fitting)), {})

    def parts(self) -> list[Part]:
        """In the order of the text; raises `DataError` where a place is not certain."""
        chat, text, marks = self.chat, self.text, self.marks
        turns = self._generation_turns()
        parts = [] if turns is None else turns
        for i, message in enumerate(chat.messages):
            if message.role != "assistant":
                parts += _content(message, text, marks.get(i), chat.places[i])
            elif turns is None:
                last = chat.goes_on and i == len(chat.messages) - 1
                start = self._start(i)
                end = len(text) if last else self._end_of(i, start)
                parts.append(Part(start, end, chat.places[i], True))
        parts.sort(key=lambda part: part.start)
        for one, two in zip(parts, parts[1:], strict=False):
            if one.end > two.start:
                raise not_found("the messages")
        return parts

    def _marks_where(self, fits: Callable[[str], object]) -> dict[int, int]:
        """With marks in contents that fit, as a template may test for empty ones; or none."""
        chat = self.chat
        base = unused_mark(chat.messages)
        marks = [f"{base}{i}End" for i in range(len(chat.messages))]
        marked = [_marked(m, mark, fits) for m, mark in zip(chat.messages, marks, strict=True)]
        if chat.goes_on:
            marked[-1] = replace(chat.messages[-1], content=marks[-1])
        found = self.facts.shown_text(marked, chat.tools, generation_prompt=chat.prompted)
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
        if either.sub("", found) != self.text or list(ends.values()) != sorted(ends.values()):
            return {}
        return ends

    def _start(self, i: int) -> int:
        """Where the assistant's message `i` begins: after the generation prompt."""
        chat, text, marks = self.chat, self.text, self.marks
        before = marks.get(i - 1)
        tail = self.facts.tail(chat.messages[i - 1].role) if i else None
        if before is not None and tail is not None:
            blanks = _blanks_after(chat.messages[i - 1].content)
            for between in (tail, blanks + tail):
                if text.startswith(between, before):
                    return before + len(between)
        if i:
            prompt = self.facts.shown_text(chat.messages[:i], chat.tools, generation_prompt=True)
            if prompt is not None and text.startswith(prompt):
                return len(prompt)
        message, end = chat.messages[i], marks.get(i)
        if end is not None and (before is not None or not i):
            opening = self.facts.opening
            at = text.find(opening, before or 0, end) if opening else -1
            if at >= 0:
                return at + len(opening)
            said = message.content.rstrip()
            said = said if text[:end].endswith(said) else said.lstrip()
            if said and not message.reasoning and text[:end].endswith(said):
                return end - len(said)
        raise not_found(f"the assistant's message {chat.places[i]}")

    def _end_of(self, i: int, start: int) -> int:
        """Where the assistant's message `i` ends: after the token that ends the turn."""
        facts, chat, text, marks = self.facts, self.chat, self.text, self.marks
        message, last = chat.messages[i], i == len(chat.messages) - 1
        known = marks.get(i)
        if known is None and (message.content.strip() or message.tool_calls or message.reasoning):
            end = self._difference(i)
            ends = [] if facts.end is None else list(facts.ends.finditer(text, start, end))
            return ends[-1].end() if ends else end
        begin = start if known is None else known
        if facts.end is not None:
            found = facts.ends.search(text, begin)
            following = marks.get(i + 1, len(text))
            if found is not None and found.end() <= following:
                return found.end()
        if last and text == facts.text(chat.messages, chat.tools):
            return len(text) - len(facts.begun)
        try:
            return self._difference(i)
        except DataError:
            if facts.end is not None or known is None or message.tool_calls:
                raise
            return known  # without an end, the content is the end

    def _difference(self, i: int) -> int:
        """Length of the rendering through message `i`, a prefix of `text`."""
        upto = self.facts.text(self.chat.messages[: i + 1], self.chat.tools)
        if not self.text.startswith(upto):
            raise not_found(f"the assistant's message {self.chat.places[i]}")
        return len(upto)

    def _generation_turns(self) -> list[Part] | None:
        """The assistant's turns as the template itself marks them; None when it does not."""
        chat, text, marks = self.chat, self.text, self.marks
        template = str(self.facts.tokenizer.chat_template)
        if not re.search(r"\{%-?\s*generation\s*-?%\}", template):
            return None
        found: list[tuple[int, int]] = []
        rendered = chat_text_of(
            self.facts.tokenizer,
            chat.messages,
            chat.tools,
            generation_prompt=chat.prompted,
            turns=found,
        )
        own = [i for i, m in enumerate(chat.messages) if m.role == "assistant"]
        if rendered != text:  # the last message is continued: it has no end yet
            found = [(start, min(end, len(text))) for start, end in found if start <= len(text)]
        found = [self._own_words(start, end) for start, end in found if end > start]
        if len(found) == len(own):
            owners = own
        else:
            at = [next((i for i in own if marks.get(i, -1) >= start), None) for start, _ in found]
            if None in at:
                raise not_found("the assistant's messages")
            owners = [i for i in at if i is not None]
        return [
            Part(start, end, chat.places[i], True)
            for (start, end), i in zip(found, owners, strict=True)
        ]

    def _own_words(self, start: int, end: int) -> tuple[int, int]:
        """A span of `{% generation %}` without the generation prompt, and what follows the end."""
        facts, text = self.facts, self.text
        for opening in filter(None, (facts.opening, facts.opening.partition("<think>")[0])):
            if text.startswith(opening, start, end):
                start += len(opening)
                break
        ends = list(facts.ends.finditer(text, start, end))
        if ends and not text[ends[-1].end() : end].strip():
            end = ends[-1].end()
        return start, end


def _blanks_after(content: str) -> str:
    return content[len(content.rstrip()) :]


def _content(message: Message, text: str, end: int | None, place: int) -> list[Part]:
    """The place of a content that ends at `end`, but for blanks, if the template writes it."""
    content = message.content.rstrip()
    for said in (content, content.lstrip()):
        if end is not None and said and text[:end].endswith(said):
            blanks = _blanks_after(message.content)
            size = len(blanks) if text.startswith(blanks, end) else 0
            return [Part(end - len(said), end + size, place, False)]
    return []


def unused_mark(messages: Sequence[Message]) -> str:
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
