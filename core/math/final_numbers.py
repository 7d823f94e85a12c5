"""The number that a worked solution ends in. Nothing here raises on any text."""

from __future__ import annotations

import re

from posttrain.core.math.answers import is_number, numbers_in
from posttrain.core.math.final_answers import after_marker, last_boxed

# What stands around a number in LaTeX and in prices, and is no part of it.
_DRESSING = re.compile(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}|\\[,!;: ]|[$%]|\\[$%]|\{,\}(?=\d)")


def number_after(text: str, marker: str) -> str | None:
    """The first number in the line after the last `marker`; None without either."""
    line = after_marker(text, marker)
    numbers = [] if line is None else numbers_in(line)
    return numbers[0] if numbers else None


def only_number_after(text: str, marker: str) -> str | None:
    """As `number_after`, when the line after the last `marker` holds the number and nothing else.

    A leading $ and a trailing % or full stop are let pass.
    """
    line = (after_marker(text, marker) or "").removeprefix("$").rstrip("%. ")
    return numbers_in(line)[0] if is_number(line) else None


def final_number(text: str, marker: str = "####") -> str | None:
    r"""The number after the last `marker`, else in the last \boxed{}, else the last of the text.

    A box that holds several numbers, such as a fraction, is read as none: picking one of them would
    make a wrong answer right.
    """
    marked = number_after(text, marker)
    if marked is not None:
        return marked
    boxed = last_boxed(text)
    if boxed is not None:
        plain = _DRESSING.sub(lambda m: "," if m.group() == "{,}" else "", boxed)
        numbers = numbers_in(plain)
        return numbers[0] if len(numbers) == 1 else None
    numbers = numbers_in(text)
    return numbers[-1] if numbers else None
