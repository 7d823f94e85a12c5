"""Errors a user can fix, one class per exit code; each takes one message, so all are picklable."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from posttrain.core.redaction import redacted


class PosttrainError(Exception):
    """Base of every error shown to a user as one sentence, without a traceback.

    Its message holds no credentials, wherever it goes.
    """

    exit_code = 1
    status = "error"

    def __init__(self, *message: object) -> None:
        super().__init__(*(redacted(part) if isinstance(part, str) else part for part in message))


class RunError(PosttrainError):
    """The run itself failed: a stage could not finish."""

    exit_code = 1


class ConfigError(PosttrainError):
    """The configuration is wrong: unknown key, unknown plugin, bad value, bad DAG."""

    exit_code = 2


class DataError(PosttrainError):
    """The data are wrong: missing file, empty set, a row without a needed field."""

    exit_code = 3


class ResourceError(PosttrainError):
    """Something the run needs is not there: disk, memory, port, weights, package."""

    exit_code = 4


class ApprovalRefused(PosttrainError):
    """A person, or the time that a gate waits, said no; what was computed stays."""

    exit_code = 6
    status = "rejected"


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """`error`, what it was raised from, and so on: the chain that a traceback prints."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def first_line(error: BaseException) -> str:
    """The class of an error and the first line of what it says, with what its colon leads to."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    said = " ".join(lines[: 2 if lines[0].endswith(":") else 1])[:200] if lines else ""
    return ": ".join(filter(None, (type(error).__name__, said)))


@contextmanager
def reading_model(what: str, expected: str) -> Iterator[None]:
    """Raise `ResourceError` for whatever libraries raise while they read a model's files.

    Their errors have no class in common: that of tokenizers is a bare `Exception`.
    """
    try:
        yield
    except (PosttrainError, MemoryError):
        raise
    except Exception as error:
        raise ResourceError(f"{what}: {first_line(error)}; {expected}") from error


MAX_NAMES = 12


def shortlist(name: str, known: Iterable[str]) -> str:
    """The names in `known` as a list; of more than twelve their count and six nearest to `name`."""
    names = list(known)
    if len(names) <= MAX_NAMES:
        return str(names)
    close = difflib.get_close_matches(name, names, n=6, cutoff=0)
    return f"{len(names)}, such as {', '.join(close)}"


def nearest(name: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` for the closest known spelling of `name`, or an empty string."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean '{matches[0]}'?" if matches else ""
