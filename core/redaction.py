"""Credentials are removed from every text that people, log files or servers see.

`redacted` does it for a text, `redacted_tree` for nested values such as a config, `redact_error`
for an exception and those behind it, `redact_logs` for everything that this process logs,
`redact_output` for what it prints as well.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, TextIO, cast
from urllib.parse import unquote, urlsplit

MARK = "***"
_UNMISTAKABLE = (
    "password|passwd|(?:api|access|account|secret|private)[_-]?key|client[_-]?secret|"
    "(?:access|auth|api|hf|hub|bearer)[_-]?token|auth[_-]?string"
)
"""Keys that name nothing else; `token` is also a part of a text."""
_SECRET_KEYS = f"pwd|secret|token|{_UNMISTAKABLE}"
_ENDS_OF_VARIABLES = (
    "(?:TOKEN|PASSWORD|PASSWD|SECRET|AUTH_STRING|CONNECTION_STRING|"
    "(?:API|ACCESS|SECRET|PRIVATE|STORAGE)_KEY)"
)
_KEY = re.compile(_SECRET_KEYS, re.IGNORECASE)
_OPTION = rf"--(?:(?:[\w-]+-)?(?:{_UNMISTAKABLE})|token|secret)"
_WHOLE_OPTION = re.compile(_OPTION, re.IGNORECASE)
# Text that may be a password ends at white space, quotes and angle brackets.
_PATTERNS = (
    # user:password@ of a URL; a password may itself hold an @, or, in SQLAlchemy's URLs, a slash.
    (
        re.compile(
            r"(?:(?<=://)|(?<=:\\/\\/))(?:[^\s/?#'\"<>\\]+@"
            r"|[^\s/?#'\"<>:@\\\[]*:(?!\d{1,5}(?:[/?#]|$))[^\s'\"<>\\]+@)"
        ),
        f"{MARK}@",
    ),
    (
        re.compile(r"(?:(?<=%3A%2F%2F)|(?<=:%2F%2F))[^\s'\"<>&/?#]+?(%40|@)", re.IGNORECASE),
        rf"{MARK}\g<1>",
    ),
    # Parameters of a URL, of a database's connection string, and lines of a config.
    (
        re.compile(
            rf"(?i)([?&;#](?:[\w.-]*[_.-])?(?:{_SECRET_KEYS}|sig|signature)=)[^\s&;#'\"<>]+"
        ),
        rf"\g<1>{MARK}",
    ),
    (re.compile(r"(?i)\b((?:password|passwd|pwd)=)[^\s&;'\"<>]+"), rf"\g<1>{MARK}"),
    (re.compile(rf"(?im)^([ \t]*(?:- )?(?:{_SECRET_KEYS}): ).+$"), rf"\g<1>'{MARK}'"),
    # JSON, also within JSON, arguments of a call, and variables of an environment.
    (
        re.compile(
            rf"(?i)(\b(?:\w+[_-])?(?:{_UNMISTAKABLE})\\*['\"]?\s*[:=]\s*b?\\*['\"])[^'\"\\]+"
        ),
        rf"\g<1>{MARK}",
    ),
    (re.compile(rf"\b([A-Z][A-Z0-9_]*{_ENDS_OF_VARIABLES}=)[^\s'\"<>]{{8,}}"), rf"\g<1>{MARK}"),
    # Options of a command, as a line or as a list that is printed.
    (
        re.compile(rf"(?i)((?<![\w-]){_OPTION}(?:['\"]?,? +|=)['\"]?)(?!--)[^\s'\",]+"),
        rf"\g<1>{MARK}",
    ),
    # Headers, and tokens that are known by their form.
    (
        re.compile(r"(?i)(\b(?:set-)?cookie['\"]?\s*[:=]\s*b?['\"]?[\w.-]+=)[^'\"\r\n]+"),
        rf"\g<1>{MARK}",
    ),
    (re.compile(r"\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{8,}"), MARK),
    (
        re.compile(r"(?i)(\bauthorization['\"]?\s*[:=]\s*b?['\"]?)(?:\w+ )?[^\s'\",]+"),
        rf"\g<1>{MARK}",
    ),
    (re.compile(r"\b(Bearer )(?=\S*\d)[\w.~+/=-]{12,}"), rf"\g<1>{MARK}"),
    (
        re.compile(
            r"\b(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
            r"|sk-[\w-]{20,}|pn[ub]_\w{16,}|A[KS]IA[0-9A-Z]{16})"
        ),
        MARK,
    ),
)
_SECRET_VARIABLE = re.compile(rf"{_ENDS_OF_VARIABLES}$")
_SHORTEST = 8
"""A shorter value of the environment is not looked for: it would be found in ordinary words."""


def redacted(text: str) -> str:
    """`text` with `***` in the place of passwords, tokens and keys.

    They are known by where they stand (the user of a URL, a parameter `token=`), by their form
    (`hf_...`), or because a variable of the environment such as HF_TOKEN holds them.
    """
    for secret in _environment_secrets():
        text = text.replace(secret, MARK)
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def names_a_secret(variable: str) -> bool:
    """Whether a variable of this name holds a credential, as its name says."""
    return _SECRET_VARIABLE.search(variable.upper()) is not None


def address(url: str) -> str:
    """A URL that a browser can open: without its user and password."""
    return redacted(url).replace(f"://{MARK}@", "://")


def redacted_tree(value: Any) -> Any:  # Any: whatever YAML or JSON holds
    """`value` with every text in it redacted, and the values of keys such as `api_key`."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, Mapping):
        return {
            key: MARK
            if isinstance(key, str) and isinstance(item, str) and _KEY.fullmatch(key)
            else redacted_tree(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        before = [None, *value]  # of a command's words: what follows such an option
        return [
            MARK if _is_secret_option(option) and isinstance(item, str) else redacted_tree(item)
            for option, item in zip(before, value, strict=False)
        ]
    return value


def _is_secret_option(word: Any) -> bool:  # Any: whatever a list holds
    return isinstance(word, str) and _WHOLE_OPTION.fullmatch(word) is not None


def errors_behind(error: BaseException) -> Iterator[BaseException]:
    """`error`, and every error that it was raised from or during the handling of, each once."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        found = waiting.pop()
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            waiting += [found.__cause__, found.__context__]
            yield found


def redact_error(error: BaseException) -> None:
    """Change the messages of `error`, and of all errors behind it, in place."""
    for found in errors_behind(error):
        found.args = tuple(redacted(a) if isinstance(a, str) else a for a in found.args)
        if isinstance(found, OSError) and isinstance(found.strerror, str):
            found.strerror = redacted(found.strerror)  # which its text is made of


def _environment_secrets() -> list[str]:
    found = []
    for name, value in os.environ.items():
        if names_a_secret(name) and not value.startswith(("/", "~")):
            found.append(value)
        elif "://" in value and "@" in value:
            try:
                password = urlsplit(value).password or ""
            except ValueError:
                continue
            found += [password, unquote(password)]
    # A long one first: a shorter one may be a part of it.
    return sorted({s for s in found if len(s) >= _SHORTEST}, key=len, reverse=True)


def redact_logs() -> None:
    """Redact what any library of this process logs from now on, tracebacks included."""
    make = logging.getLogRecordFactory()
    if getattr(make, "redacts", False):
        return

    def made(*given: Any, **named: Any) -> logging.LogRecord:  # Any: as logging hands them over
        record = make(*given, **named)
        try:
            text = record.getMessage()
        except (TypeError, ValueError):  # its arguments do not fit: logging reports that
            return record
        if (clean := redacted(text)) != text:
            record.msg, record.args = clean, None
        if record.exc_info and record.exc_info[1] is not None:
            text = "".join(traceback.format_exception(record.exc_info[1])).rstrip()
            if (clean := redacted(text)) != text:
                record.exc_text = clean
        return record

    made.redacts = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(made)


class _RedactedStream:
    """A text stream that writes everything redacted."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        self._stream.write(redacted(text))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:  # Any: what the stream itself has
        return getattr(self._stream, name)


def redacting(stream: TextIO) -> TextIO:
    """`stream`, through which no credentials pass."""
    return stream if isinstance(stream, _RedactedStream) else cast(TextIO, _RedactedStream(stream))


def redact_output() -> None:
    """Redact what any library of this process logs or prints from now on."""
    redact_logs()
    sys.stdout, sys.stderr = redacting(sys.stdout), redacting(sys.stderr)
