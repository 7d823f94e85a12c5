"""Reading numbers from text that a model wrote. Nothing here raises on any text."""

from __future__ import annotations

import re
from decimal import Decimal

# Groups of thousands count as one number; a minus directly after a digit is an operator ("45-23").
NUMBER = re.compile(
    r"(?<![0-9])-?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)


def numbers_in(text: str) -> list[str]:
    """All decimal numbers of `text` in order, without thousands separators.

    "23 + 45 = 68." reads as 23, 45, 68; "1,234" as 1234; "45-23" as 45, 23. A sign counts when it
    touches the number and no digit stands before it.
    """
    return [match.group().replace(",", "") for match in NUMBER.finditer(_ascii_minus(text))]


def is_number(text: str) -> bool:
    return NUMBER.fullmatch(_ascii_minus(text.strip())) is not None


def same_number(left: str, right: str) -> bool:
    """Whether two strings that hold `is_number` have the same value: 68 and 68.0 do."""
    return _value(left) == _value(right)


def _value(text: str) -> Decimal:
    return Decimal(_ascii_minus(text.strip()).replace(",", ""))


def _ascii_minus(text: str) -> str:
    # U+2212 is the minus sign of typeset mathematics.
    return text.replace("\u2212", "-")
