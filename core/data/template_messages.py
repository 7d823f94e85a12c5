"""Messages as a chat template takes them, and as text what it has no place for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from posttrain.core.data.control import ControlTokens
from posttrain.core.data.template_facts import TemplateFacts, thought_first
from posttrain.core.data.tool_calls import json_text, write_tool_calls
from posttrain.core.errors import DataError
from posttrain.core.types import Message, ToolSchema

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


@dataclass(frozen=True, slots=True)
class Chat:
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


def as_taken(
    facts: TemplateFacts,
    control: ControlTokens,
    messages: Sequence[Message],
    tools: Sequence[ToolSchema],
    *,
    generation_prompt: bool = False,
    tools_in_system: bool = False,
) -> Chat:
    """The conversation for `facts`' template, control tokens in its texts taken out by `control`.

    Raises `DataError` for tools, calls or results that the template leaves out.
    """
    if not messages:
        raise DataError("a conversation without messages: give at least one")
    plain, schemas, back = control.protect(messages, tools)
    pairs = list(enumerate(plain))
    if tools_in_system:
        pairs, schemas = _as_text(pairs, schemas), []
    elif schemas and not facts.shows("tools"):
        raise DataError(f"the model's chat template has no tools: {OTHER_WAY}")
    elif not facts.shows("calls") and any(m.tool_calls for m in plain):
        raise DataError(f"the model's chat template leaves tool calls out: {OTHER_WAY}")
    elif not facts.shows("results") and any(m.role == "tool" for m in plain):
        raise DataError(f"the model's chat template has no messages of tools: {OTHER_WAY}")
    if any(m.reasoning for m in plain) and not facts.shows("reasoning"):
        # A template may also take reasoning out of contents: then it wants none.
        shown = not facts.exists or facts.shows("inline")
        pairs = [(i, thought_first(m) if shown else replace(m, reasoning="")) for i, m in pairs]
    if facts.exists and pairs[0][1].role == "system" and not facts.shows("system"):
        pairs = _without_system(pairs)
    places, made = zip(*pairs, strict=True)
    is_own = made[-1].role == "assistant"
    return Chat(
        made,
        places,
        tuple(schemas),
        back,
        prompted=generation_prompt and not is_own,
        goes_on=generation_prompt and is_own,
    )


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
