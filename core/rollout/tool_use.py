"""What environments with tools share: their settings, and a tool's answer to a call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Annotated, TypeVar

from pydantic import Field

from posttrain.core.config.base import Component
from posttrain.core.contracts import PluginConfig, ToolResult
from posttrain.core.types import Message

ANY_NUMBER = 1_000_000
"""`at_once` of an environment that only its tools limit."""
MaxCalls = Annotated[
    int,
    Field(
        ge=1,
        le=100_000,
        description="calls of an episode, at most; further calls get an error and count as failed",
    ),
]


class CallLimits(PluginConfig):
    """Limits of the calls in an episode."""

    max_calls: MaxCalls = 8
    max_result_chars: int = Field(default=2000, ge=1, description="characters of a result, at most")

    def none_left(self) -> ToolResult:
        """The result of a call beyond `max_calls`."""
        return ToolResult(f"error: no call is left of {self.max_calls}", failed=True)


class ToolUseConfig(CallLimits):
    """Settings of environments with tools of ours."""

    tools: tuple[Component, ...] = Field(
        default=(Component(name="calculator"),),
        min_length=1,
        description="tools by name, each with its own fields",
    )


ONE_ACTION = "error: one action a turn"
MALFORMED = (
    "error: the tool call could not be read, expected an object with the tool's name and its "
    "arguments as JSON"
)


def no_such_tool(names: Iterable[str]) -> ToolResult:
    """The result of a call of another tool than these."""
    return ToolResult(f"error: no such tool; the tools are {', '.join(names)}", failed=True)


def answered(
    said: Message, results: Sequence[ToolResult], max_chars: int
) -> tuple[tuple[Message, ...], dict[str, float]]:
    """Messages with the results of the calls that `said` makes, and with an error for each call
    that could not be read; and how many calls there were, and how many failed."""
    messages = [
        Message("tool", result.text[:max_chars], name=call.name, tool_call_id=call.id)
        for call, result in zip(said.tool_calls, results, strict=True)
    ]
    messages += [Message("tool", MALFORMED)] * len(said.malformed)
    failed = sum(result.failed for result in results) + len(said.malformed)
    return tuple(messages), {"calls": float(len(messages)), "failed": float(failed)}


def reply(said: Message, text: str) -> tuple[Message, ...]:
    """`text` as the answer to a turn that takes one action: the result of the turn's call, or the
    user's words. Further calls are answered too, since no template leaves one without a result."""
    if not said.tool_calls:
        return (Message("tool" if said.malformed else "user", text),)
    first, *others = said.tool_calls
    more = [Message("tool", ONE_ACTION, name=c.name, tool_call_id=c.id) for c in others]
    return (Message("tool", text, name=first.name, tool_call_id=first.id), *more)


T = TypeVar("T")
Arguments = TypeVar("Arguments")


logger = logging.getLogger(__name__)
_reported: set[tuple[str, str]] = set()
_raised: ContextVar[list[str] | None] = ContextVar("raised", default=None)
_unreachable: ContextVar[Exception | None] = ContextVar("unreachable", default=None)


def answer_of(tool: Callable[[Arguments], ToolResult], arguments: Arguments) -> ToolResult:
    """What the tool says; an error that it raises is a failed result."""
    try:
        if (reason := _unreachable.get()) is not None:
            raise reason
        return tool(arguments)
    except Exception as error:  # a tool may raise anything; the model reads its error
        if (noted := _raised.get()) is not None:
            noted.append(type(error).__name__)
        if reason is None:
            _report(tool, error)
        return ToolResult(f"error: the tool failed ({type(error).__name__})", failed=True)


def _report(tool: Callable[..., ToolResult], error: Exception) -> None:
    """Log what a tool raised, which the model reads as a failed call: one of each kind."""
    kind = getattr(tool, "__qualname__", type(tool).__name__), type(error).__name__
    if kind not in _reported:
        _reported.add(kind)
        logger.warning("a tool failed, `%s`, with %s: %s (the first of its kind)", *kind, error)
        logger.debug("where the tool failed", exc_info=error)


def noting_errors() -> AbstractContextManager[list[str]]:
    """Note the errors that tools raise, in this thread."""
    noted: list[str] = []
    return _holding(_raised, noted)


def unreachable(reason: Exception) -> AbstractContextManager[Exception]:
    """Let every tool fail for `reason` instead of being called, in this thread."""
    return _holding(_unreachable, reason)


@contextmanager
def _holding(variable: ContextVar[T | None], value: T) -> Iterator[T]:
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)
