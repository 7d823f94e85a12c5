"""What a chat template writes around messages, found by rendering small conversations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from posttrain.core.data.chat import MARK, chat_text_of, own_template, turn_end
from posttrain.core.types import Message, ToolCall, ToolSchema

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DUMMY_ID = "call00000"
"""A call's id of the form that the strictest templates take."""


class TemplateFacts:
    """The template of a tokenizer; each fact is found when it is first asked for.

    `special` are the tokenizer's special tokens by name, `end_token_ids` those that end a response.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        special: Mapping[str, int],
        end_token_ids: Sequence[int],
    ) -> None:
        self.tokenizer = tokenizer
        self.exists = tokenizer.chat_template is not None
        self._special, self._end_token_ids = special, end_token_ids
        self._tails: dict[str, str | None] = {}
        self._shown: dict[str, bool] = {}

    def text(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        *,
        generation_prompt: bool = False,
    ) -> str:
        """The messages as the template writes them; raises `DataError` if it refuses them."""
        return chat_text_of(self.tokenizer, messages, tools, generation_prompt=generation_prompt)

    def shown_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        *,
        generation_prompt: bool = False,
    ) -> str | None:
        """As `text`; None where the template refuses the messages."""
        return own_template(self.tokenizer, messages, tools, generation_prompt=generation_prompt)

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
                "inline": [user, thought_first(Message("assistant", "A", reasoning=MARK))],
            }[what]
            if what == "results" and not self.shows("calls"):
                chat[1] = Message("assistant", "A")
            tools = [schema] if what == "tools" else []
            text = self.shown_text(chat, tools, generation_prompt=what == "system") or ""
            self._shown[what] = MARK in text
        return self._shown[what]

    def tail(self, role: str) -> str | None:
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
            text = self.shown_text(chats[role], generation_prompt=True) or ""
            _, found, after = text.rpartition(MARK)
            self._tails[role] = after if found else None
        return self._tails[role]

    @cached_property
    def opening(self) -> str:
        """The generation prompt."""
        user = [Message("user", "Q")]
        bare, prompt = self.shown_text(user), self.shown_text(user, generation_prompt=True)
        if bare is None or prompt is None or not prompt.startswith(bare):
            return ""
        return prompt[len(bare) :]

    @cached_property
    def begun(self) -> str:
        """What a template without ends writes of a next turn, although nobody asked for it."""
        chat = [Message("user", "Q"), Message("assistant", MARK)]
        last, followed = (self.shown_text(c) or "" for c in (chat, [*chat, Message("user", "Q")]))
        after = last.partition(MARK)[2]
        if followed.partition(MARK)[2].startswith(after):
            return ""
        return after.lstrip() if self.shown_text(chat, generation_prompt=True) == last else ""

    @cached_property
    def end(self) -> str | None:
        """The name of the token with which the template ends a turn."""
        found = turn_end(self.tokenizer)
        return None if found is None else str(self.tokenizer.convert_ids_to_tokens(found.token))

    @cached_property
    def ends(self) -> re.Pattern[str]:
        """Finds the names of all tokens that end a turn or a response."""
        names = {n for n, i in self._special.items() if i in self._end_token_ids}
        names |= {self.end} if self.end is not None else set()
        return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or r"(?!)")

    @cached_property
    def lead(self) -> str:
        """Blanks that the template writes between the generation prompt and a content."""
        chat = [Message("user", "Q"), Message("assistant", MARK)]
        text = self.shown_text(chat)
        prompt = self.shown_text(chat[:1], generation_prompt=True)
        if text is None or prompt is None:
            return ""
        before = text.partition(MARK)[0]
        lead = before[len(prompt) :] if before.startswith(prompt) else ""
        return "" if lead.strip() else lead


def thought_first(message: Message) -> Message:
    """The message with its reasoning in its content, for templates that have no place for it."""
    if not message.reasoning:
        return message
    content = f"<think>\n{message.reasoning}\n</think>\n\n{message.content}"
    return replace(message, content=content, reasoning="")
