"""Messages to tokens by a model's own chat template, and tokens back to a message."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from posttrain.core.contracts import PluginConfig, Rendered, Renderer
from posttrain.core.data.chat import MARK
from posttrain.core.data.control import ControlTokens
from posttrain.core.data.template_facts import TemplateFacts
from posttrain.core.data.template_messages import Chat, as_taken
from posttrain.core.data.template_places import Places, lines_of, not_found, unused_mark
from posttrain.core.data.tool_calls import parse_assistant, split_reasoning, tool_call_form
from posttrain.core.errors import DataError
from posttrain.core.types import Message, ToolCall, ToolSchema

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPEAKING = re.compile("tool|python|think|call|args", re.IGNORECASE)
"""Names of special tokens that are a part of what the assistant says."""


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
        self.facts = TemplateFacts(tokenizer, self.control.ids, end_token_ids)

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
        parts = Places(self.facts, chat, text).parts() if self.facts.exists else lines_of(chat)
        places = [place for part in parts for place in (part.start, part.end)]
        made, moved = self.control.encode(
            text, chat.back, places, add_special_tokens=not self.facts.exists
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
            self._whole(chat), chat.back, add_special_tokens=not self.facts.exists
        )
        return made.token_ids

    def answer(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()
    ) -> tuple[int, ...]:
        """As in `Renderer`; of a template that writes the last message alone, the content."""
        last = messages[-1]
        plain = self.facts.exists and not (last.reasoning or last.tool_calls)
        if plain and not self.facts.shows("history"):
            return self.control.encode_content(last)
        return super().answer(messages, tools)

    def apart(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], turn: tuple[int, ...]
    ) -> tuple[int, ...]:
        """The last message where its first token, or the template, joins it to the prompt's end."""
        if not self.facts.exists:
            return self.control.encode_content(messages[-1])
        chat = self._chat(messages, tools)
        text = self._whole(chat)
        part = next(
            p
            for p in reversed(Places(self.facts, chat, text).parts())
            if p.place == len(messages) - 1
        )
        prompt = self.facts.text(chat.messages[:-1], chat.tools, generation_prompt=True)
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
        if not self.facts.exists:
            chat = self._chat(messages, tools)
            said = [
                m.content for m, place in zip(chat.messages, chat.places, strict=True) if place >= 0
            ]
            text = "\n" + "\n".join(said) + "\n"
            return self.control.encode(text, chat.back)[0].token_ids
        mark = unused_mark(messages)
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
        text = self.facts.text(chat.messages, chat.tools, generation_prompt=True)
        place = text.rfind(mark) + len(mark)  # a template with calls may leave the content out
        if place < len(mark):
            raise not_found("what follows an assistant's turn")
        if self.facts.end is None:
            number = next(i for i, m in enumerate(chat.messages) if m.role == "assistant")
            before = (
                self.facts.text(chat.messages[: number + 1], chat.tools) if calls else text[:place]
            )
            if not text.startswith(before):
                raise not_found("what follows an assistant's turn")
            return self.control.encode(text[len(before) :], chat.back)[0].token_ids
        found = self.facts.ends.search(text, place)
        if found is None:
            raise not_found("the end of an assistant's turn before other messages")
        # With the end token in front, so that nothing is taken for the beginning of a text.
        made, _ = self.control.encode(text[found.start() :], chat.back)
        return made.token_ids[1:] if ended else made.token_ids

    def _in_the_middle(self, text: str, back: Mapping[str, str]) -> tuple[int, ...]:
        """The tokens of text that is not the beginning of one: with an end token in front."""
        end = self.facts.end or ""
        return self.control.encode(end + text, back)[0].token_ids[bool(end) :]

    def parse(self, token_ids: Sequence[int], tools: Sequence[ToolSchema] = ()) -> Message:
        """The message that the tokens write, tool calls in the form of the config."""
        # Special tokens are left out, but those that tell calls and reasoning from other text.
        speaking = {i for name, i in self.control.ids.items() if SPEAKING.search(name)}
        hidden = set(self.tokenizer.all_special_ids) - speaking | set(self.end_token_ids)
        own = [token for token in token_ids if token not in hidden]
        text = str(self.tokenizer.decode(own, skip_special_tokens=False))
        opened = (self.facts.tail("user") or "").rstrip().endswith("<think>")
        return parse_assistant(
            text.removeprefix(self.facts.lead), self.form, opened=opened, tools=tools
        )

    @cached_property
    def form(self) -> str:
        """The form in which the model writes tool calls."""
        if self.config.tool_calls != "auto":
            return self.config.tool_calls
        if self.config.tools_in_system:
            return "hermes"
        return tool_call_form(str(self.tokenizer.chat_template or ""))

    def _chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        *,
        generation_prompt: bool = False,
    ) -> Chat:
        return as_taken(
            self.facts,
            self.control,
            messages,
            tools,
            generation_prompt=generation_prompt,
            tools_in_system=self.config.tools_in_system,
        )

    def _whole(self, chat: Chat) -> str:
        last = chat.messages[-1]
        if not self.facts.exists:
            return "\n".join(m.content for m in chat.messages) + ("\n" if chat.prompted else "")
        if not chat.goes_on:
            return self.facts.text(chat.messages, chat.tools, generation_prompt=chat.prompted)
        if last.tool_calls:
            raise DataError(
                "the last message is the assistant's and calls tools, so it cannot be continued: "
                "end the prompt with the tools' messages"
            )
        # The content is written as it is, even if the template strips or rewrites contents.
        marked = [*chat.messages[:-1], replace(last, content=MARK)]
        before, found, _ = self.facts.text(marked, chat.tools).rpartition(MARK)
        if not found:
            raise DataError(
                "the model's chat template leaves the last assistant's message out, so it cannot "
                "be continued: end the prompt with the user's message, or choose a model with "
                "another template"
            )
        return before + last.content
