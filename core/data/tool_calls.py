"""How models write reasoning and tool calls as text, and how these texts are read back.

A form is the way a family of models writes its calls:

    hermes       <tool_call>{"name": ..., "arguments": {...}}</tool_call>; Hermes, Qwen2.5, Qwen3
    qwen_xml     <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>
    llama3       {"name": ..., "parameters": {...}}, alone or after <|python_tag|>, split by ;
    mistral      [TOOL_CALLS][{"name": ..., "arguments": {...}}]
    mistral_args [TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{...}; Mistral's tokenizers from v11 on, the id
                 in v11 only
    glm          <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>
    deepseek     <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME {...}<｜tool▁call▁end｜>
    none         no calls: everything is text
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from posttrain.core.data.tool_arguments import ArgumentSchemas, json_value
from posttrain.core.types import Message, ToolCall, ToolSchema

THINK = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""What begins and ends reasoning."""

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_SEP, CALL_END = (
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
)


def parse_assistant(
    text: str, form: str, *, opened: bool = False, tools: Sequence[ToolSchema] = ()
) -> Message:
    """The assistant's message that `text`, one turn without its end, writes.

    Reasoning that is never closed is all of the text. With `opened` the prompt has begun the
    reasoning; without it, a text that closes reasoning and did not open it is read the same way. A
    call that cannot be read is in `malformed`, as it is written. The forms `glm` and `qwen_xml`
    write strings without quotes: the schemas of `tools`, those that the model was shown, say of
    which type an argument is (`ArgumentSchemas.value`). Never raises, whatever the text.
    """
    if form not in _FORMS:
        raise ValueError(f"no form of tool calls is named '{form}' (forms: {list(_FORMS)})")
    reasoning, rest = split_reasoning(text, opened=opened)
    found = _Found()
    _FORMS[form].read(rest, found, ArgumentSchemas(tools))
    return Message(
        "assistant",
        found.content(),
        tuple(found.calls),
        reasoning=reasoning,
        malformed=tuple(found.malformed),
    )


def split_reasoning(text: str, *, opened: bool = False) -> tuple[str, str]:
    """Reasoning and the text that follows it, without the line ends around the reasoning."""
    for begin, end in THINK:
        head = text.lstrip()
        starts = head.startswith(begin)
        inner = head[len(begin) :] if starts else text
        before, closed, after = inner.partition(end)
        if closed and (starts or opened or not _opens_anything(before, begin)):
            return before.strip("\n"), after.lstrip("\n")
        if starts:
            return inner.strip("\n"), ""
    return (text.strip("\n"), "") if opened else ("", text)


def _opens_anything(text: str, begin: str) -> bool:
    """Whether reasoning or a call begins in `text`, so that it is not the end of a prompt's own."""
    marks = (begin, OPEN, TOOL_CALLS, CALL_BEGIN, PYTHON_TAG)
    return text.lstrip().startswith("{") or any(mark in text for mark in marks)


def tool_call_form(template: str) -> str:
    """The form of tool calls that a chat template writes, by the marks in its text."""
    marks = (
        (CALL_BEGIN, "deepseek"),
        (ARGS, "mistral_args"),
        (TOOL_CALLS, "mistral"),
        ("<arg_key>", "glm"),
        ("<function=", "qwen_xml"),
        ("<tool_call>", "hermes"),
    )
    for mark, form in marks:
        if mark in template:
            return form
    is_llama = '"parameters": ' in template and "tool_calls" in template
    return "llama3" if is_llama else "none"


def write_tool_calls(calls: Sequence[ToolCall], form: str) -> str:
    """All calls of a turn, joined as the models of `form` join them; empty without calls."""
    if form not in _FORMS:
        raise ValueError(f"no form of tool calls is named '{form}' (forms: {list(_FORMS)})")
    return _FORMS[form].write(calls) if calls else ""


def json_text(value: object) -> str:
    """JSON as chat templates write it."""
    return json.dumps(value, ensure_ascii=False)


# --- reading ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Found:
    """What a text has given so far."""

    texts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    malformed: list[str] = field(default_factory=list)

    def content(self) -> str:
        """The text outside calls; blanks between and around calls do not count."""
        if not self.calls and not self.malformed:
            return "".join(self.texts)
        return "".join(text for text in self.texts if text.strip())

    def add(self, call: ToolCall | None, text: str) -> None:
        """A call, or, if it could not be read, its text."""
        if call is None:
            self.malformed.append(text.rstrip("\n"))
        else:
            self.calls.append(call)


def _json_end(text: str, start: int) -> int | None:
    """The end of the JSON value that begins at `start`, strings with any tags in them included."""
    try:
        return json.JSONDecoder().raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return None


def _call(value: Any, arguments: tuple[str, ...] = ("arguments",)) -> ToolCall | None:
    """The call that a JSON value describes; without arguments it has none. Any: a JSON value."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    given: object = next((value[name] for name in arguments if name in value), {})
    if not isinstance(given, dict):
        return None
    call_id = value.get("id")
    return ToolCall(value["name"], given, call_id if isinstance(call_id, str) else "")


def _read_none(text: str, found: _Found, schemas: ArgumentSchemas) -> None:
    found.texts.append(text)


def _read_tagged(text: str, found: _Found, schemas: ArgumentSchemas) -> None:
    """Calls between <tool_call> tags, whose bodies are JSON, XML or GLM's keys and values."""
    at = 0
    while (start := text.find(OPEN, at)) >= 0:
        found.texts.append(text[at:start].removesuffix("\n"))
        at, call = _tagged_call(text, start + len(OPEN), schemas)
        found.add(call, text[start:at])
    found.texts.append(text[at:])


def _tagged_call(text: str, start: int, schemas: ArgumentSchemas) -> tuple[int, ToolCall | None]:
    """Where the call whose body begins at `start` ends, and the call if it can be read."""
    body = _skip_blanks(text, start)
    if text.startswith("{", body):
        end = _json_end(text, body)
        if end is not None and text.startswith(CLOSE, _skip_blanks(text, end)):
            return _skip_blanks(text, end) + len(CLOSE), _call(json_value(text[body:end]))
    for head, pair, tail in (XML, GLM):
        name = head.match(text, body)
        read = name and _pairs(text, name, pair, tail, schemas)
        if read:
            return read
    # Up to its closing tag; one that is never closed reaches up to the next call.
    following = text.find(OPEN, start)
    limit = following if following >= 0 else len(text)
    close = text.find(CLOSE, start, limit)
    return (limit if close < 0 else close + len(CLOSE)), None


def _skip_blanks(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


# Of a call that is not JSON: its name, a key with its value, and its end. A value may hold other
# tags, but not the ones that would begin the next value.
XML = (
    re.compile(r"<function=([^>\n]+)>"),
    re.compile(
        r"\s*<parameter=([^>\n]+)>\n?((?:(?!<parameter=|<function=).)*?)\n?</parameter>"
        r"(?=\s*(?:<parameter=|</function>))",
        re.DOTALL,
    ),
    re.compile(rf"\s*</function>\s*{CLOSE}"),
)
GLM = (
    re.compile(r"([\w.:/-]+)(?=\s*(?:<arg_key>|</tool_call>))"),
    re.compile(
        r"\s*<arg_key>([^<]*)</arg_key>\s*"
        r"<arg_value>((?:(?!<arg_key>|<arg_value>).)*?)</arg_value>"
        r"(?=\s*(?:<arg_key>|</tool_call>))",
        re.DOTALL,
    ),
    re.compile(rf"\s*{CLOSE}"),
)


def _pairs(
    text: str,
    head: re.Match[str],
    pair: re.Pattern[str],
    tail: re.Pattern[str],
    schemas: ArgumentSchemas,
) -> tuple[int, ToolCall] | None:
    """A call from its name to its end; None if anything else stands among its keys and values."""
    name, at = head[1].strip(), head.end()
    arguments: dict[str, Any] = {}  # Any: JSON values
    while found := pair.match(text, at):
        key = found[1].strip()
        if not key or key in arguments:
            return None
        arguments[key] = schemas.value(name, key, found[2])
        at = found.end()
    end = tail.match(text, at)
    return (end.end(), ToolCall(name, arguments)) if name and end else None


def _read_llama3(text: str, found: _Found, schemas: ArgumentSchemas) -> None:
    """JSON objects that are all of the text, or what follows the tag; other JSON is an answer."""
    calls, left = _llama3_calls(text)
    if not calls and PYTHON_TAG in text:
        content, _, after = text.partition(PYTHON_TAG)
        found.texts.append(content)
        calls, left = _llama3_calls(after)
        if not calls:
            left = PYTHON_TAG + after
    elif not calls and not LLAMA3_START.match(text):
        found.texts.append(text)
        return
    found.calls += calls
    if left.strip():
        found.malformed.append(left)


LLAMA3_START = re.compile(r'\s*\{\s*"name"\s*:\s*"[^"]*"\s*,\s*"(parameters|arguments)"')


def _llama3_calls(text: str) -> tuple[list[ToolCall], str]:
    """The calls that `text` begins with, and what is left of it."""
    calls, at = [], _skip_blanks(text, 0)
    while text.startswith("{", at) and (end := _json_end(text, at)) is not None:
        value = json_value(text[at:end])
        call = _call(value, ("parameters", "arguments"))
        if call is None or not {"parameters", "arguments"} & set(value):
            break
        calls.append(call)
        at = _skip_blanks(text, end)
        if text.startswith(";", at):
            at = _skip_blanks(text, at + 1)
    return calls, text[at:]


def _read_mistral(text: str, found: _Found, schemas: ArgumentSchemas) -> None:
    """A list of calls after the mark, or a name and arguments after each mark."""
    content, *parts = _outside_json(text, TOOL_CALLS)
    found.texts.append(content)
    for part in parts:
        body = part.strip()
        if body.startswith("["):
            end = _json_end(body, 0)
            value = None if end is None else json_value(body[:end])
            if end is None or not isinstance(value, list) or body[end:].strip() or not value:
                found.malformed.append(TOOL_CALLS + part)
                continue
            for item in value:
                found.add(_call(item), json_text(item))
        else:
            name, mark, arguments = body.partition(ARGS)
            name, _, call_id = name.partition(CALL_ID)
            name = name.strip()
            if not mark:  # Some models leave the mark out: NAME{...}
                name, brace, arguments = body.partition("{")
                name, arguments = name.strip(), brace + arguments
            value = json_value(arguments)
            whole = name and not re.search(r"\s", name) and isinstance(value, dict)
            found.add(ToolCall(name, value, call_id.strip()) if whole else None, TOOL_CALLS + part)


def _outside_json(text: str, mark: str) -> Iterator[str]:
    """The parts of `text` between marks; a mark inside a JSON string of a part is its text."""
    start, at = 0, text.find(mark)
    while at >= 0:
        yield text[start:at]
        start = at + len(mark)
        opened = re.compile(r"[^\[{]*+(?:\[ARGS\])?+\s*+(?=[\[{])").match(text, start)
        end = _json_end(text, opened.end()) if opened else None
        at = text.find(mark, start if end is None else end)
    yield text[start:]


def _read_deepseek(text: str, found: _Found, schemas: ArgumentSchemas) -> None:
    """Calls between marks, with arguments in a fence (V3, R1) or bare (V3.1)."""
    first = min((i for i in (text.find(CALLS_BEGIN), text.find(CALL_BEGIN)) if i >= 0), default=-1)
    if first < 0:
        found.texts.append(text)
        return
    found.texts.append(text[:first])
    at = first
    while (start := text.find(CALL_BEGIN, at)) >= 0:
        found.texts.append(_without_marks(text[at:start]))
        at, call = _deepseek_call(text, start + len(CALL_BEGIN))
        found.add(call, text[start:at])
    if found.calls or found.malformed:
        found.texts.append(_without_marks(text[at:]))
    else:
        found.malformed.append(text[first:])


def _without_marks(text: str) -> str:
    return text.replace(CALLS_BEGIN, "").replace(CALLS_END, "")


def _deepseek_call(text: str, start: int) -> tuple[int, ToolCall | None]:
    """Where the call ends, and the call if it can be read."""
    head = re.compile(
        rf"\s*+(?:(?:function)?{CALL_SEP}([^\n`{{]++)\s*+```json\s*+"
        rf"|([^\n<｜]++){CALL_SEP}\s*+)(?=\{{)"
    ).match(text, start)
    end = _json_end(text, head.end()) if head else None
    if head and end is not None:
        tail = re.compile(rf"\s*```\s*{CALL_END}" if head[1] else rf"\s*{CALL_END}")
        closed = tail.match(text, end)
        if closed:
            value = json_value(text[head.end() : end])
            name = (head[1] or head[2]).strip()
            return closed.end(), ToolCall(name, value) if value is not None and name else None
    following = re.compile(f"{CALL_BEGIN}|{CALLS_END}").search(text, start)
    limit = following.start() if following else len(text)
    close = text.find(CALL_END, start, limit)
    return (limit if close < 0 else close + len(CALL_END)), None


# --- writing ----------------------------------------------------------------------------------


def _write_none(calls: Sequence[ToolCall]) -> str:
    raise ValueError("models of the form 'none' make no tool calls")


def _write_hermes(calls: Sequence[ToolCall]) -> str:
    return "\n".join(f"{OPEN}\n{_object(call, 'arguments')}\n{CLOSE}" for call in calls)


def _write_llama3(calls: Sequence[ToolCall]) -> str:
    return "; ".join(_object(call, "parameters") for call in calls)


def _object(call: ToolCall, arguments: str) -> str:
    return json_text({"name": call.name, arguments: dict(call.arguments)})


def _write_xml(calls: Sequence[ToolCall]) -> str:
    return "\n".join(
        f"{OPEN}\n<function={call.name}>\n"
        + "".join(
            f"<parameter={key}>\n{_bare(value)}\n</parameter>\n"
            for key, value in call.arguments.items()
        )
        + f"</function>\n{CLOSE}"
        for call in calls
    )


def _write_glm(calls: Sequence[ToolCall]) -> str:
    return "\n".join(
        f"{OPEN}{call.name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_bare(value)}</arg_value>\n"
            for key, value in call.arguments.items()
        )
        + CLOSE
        for call in calls
    )


def _bare(value: object) -> str:
    return value if isinstance(value, str) else json_text(value)


def _write_mistral(calls: Sequence[ToolCall]) -> str:
    made = [
        {"name": call.name, "arguments": dict(call.arguments)}
        | ({"id": call.id} if call.id else {})
        for call in calls
    ]
    return TOOL_CALLS + json_text(made)


def _write_mistral_args(calls: Sequence[ToolCall]) -> str:
    return "".join(
        f"{TOOL_CALLS}{call.name}{CALL_ID + call.id if call.id else ''}"
        f"{ARGS}{json_text(dict(call.arguments))}"
        for call in calls
    )


def _write_deepseek(calls: Sequence[ToolCall]) -> str:
    written = (
        f"{CALL_BEGIN}function{CALL_SEP}{call.name}\n```json\n"
        f"{json_text(dict(call.arguments))}\n```{CALL_END}"
        for call in calls
    )
    return CALLS_BEGIN + "\n".join(written) + CALLS_END


class _Form(NamedTuple):
    read: Callable[[str, _Found, ArgumentSchemas], None]
    write: Callable[[Sequence[ToolCall]], str]


_FORMS: dict[str, _Form] = {
    "hermes": _Form(_read_tagged, _write_hermes),
    "qwen_xml": _Form(_read_tagged, _write_xml),
    "llama3": _Form(_read_llama3, _write_llama3),
    "mistral": _Form(_read_mistral, _write_mistral),
    "mistral_args": _Form(_read_mistral, _write_mistral_args),
    "glm": _Form(_read_tagged, _write_glm),
    "deepseek": _Form(_read_deepseek, _write_deepseek),
    "none": _Form(_read_none, _write_none),
}

TOOL_CALL_FORMS: tuple[str, ...] = tuple(_FORMS)
"""Names of the forms."""
