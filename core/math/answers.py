"""Final answers in text: where they are, which number they state, and whether two agree.

Nothing here raises on any text.
"""

from __future__ import annotations

import re
import unicodedata
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


_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_CURRENCY = re.compile(r"\\?\$|[€£¥₹]")
_THOUSANDS = re.compile(r"(?<=[0-9])(?:,|\{,\}|\\[,;:! ]| )(?=[0-9]{3}(?![0-9]))")
_NUMBER = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_MIXED = re.compile(r"([+-]?)\s*([0-9]+)\s+([0-9]+)\s*/\s*([0-9]+)")
_SCIENTIFIC = re.compile(rf"([+-]?{_NUMBER})[eE]([+-]?[0-9]+)")
# "18", "-3/4", "50 %", "5 apples", "12 cm^2": a number, perhaps a fraction, perhaps with its unit.
_WITH_UNIT = re.compile(
    rf"([+-]?\s*{_NUMBER}(?:\s*/\s*[0-9]+)?)(?:\s*(\\?%)|\s+[A-Za-z][A-Za-z .]*(?:\^?[23])?)?"
)
_TWO_NUMBERS = re.compile(r"[0-9.]\s+[0-9.]")
_VULGAR = re.compile(r"(?<=[0-9])(?=[\u00bc-\u00be\u2150-\u215e])")
_POWER = r"(?:\^|\*\*)\s*[{(]*\s*[0-9]"
_HUGE = re.compile(
    rf"[0-9]\s*[)}}]*\s*{_POWER}[0-9]*\s*[)}}]*\s*{_POWER}|{_POWER}[0-9]{{4}}|[0-9]{{4}}\s*[)}}]*\s*!"
)
_WORDS = re.compile(r"[A-Za-z][A-Za-z' -]+")


def after_marker(text: str, marker: str) -> str | None:
    """What stands between the last `marker` and the end of its line; None without one."""
    _, found, tail = text.rpartition(marker)
    return tail.strip().partition("\n")[0].rstrip() if found else None


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...} or \fbox{...}, braces balanced; None without one.

    A box that is never closed, as in a truncated response, is none.
    """
    boxes = {match.end() for match in _BOXED.finditer(text)}
    opened: list[int] = []
    start, end = -1, -1
    for index, character in enumerate(text):
        if character not in "{}" or (index and text[index - 1] == "\\"):
            continue
        if character == "{":
            opened.append(index + 1)
        elif opened:
            inside = opened.pop()
            if inside in boxes and inside > start:  # of nested ones, the inner one
                start, end = inside, index
    return None if start < 0 else text[start:end]


def as_latex(answer: str) -> str:
    r"""A short answer, written in any of the usual ways, as one LaTeX expression.

    Dollar signs (currency or mathematics), separators of thousands, units after a number, typeset
    minus signs and fractions (½), mixed numbers (3 1/2), scientific notation and a full stop at the
    end are put into the form LaTeX has for them; words become \text{...}. Two numbers with nothing
    between them are no answer: the result is empty.
    """
    plain = (
        unicodedata.normalize("NFKC", _VULGAR.sub(" ", answer))
        .replace("\u2212", "-")
        .replace("\u2044", "/")
    )
    plain = _CURRENCY.sub("", plain).strip().strip("*_`\"'").strip()
    plain = _THOUSANDS.sub("", plain.rstrip(".").strip())
    if unit := _WITH_UNIT.fullmatch(plain):
        number, percent = unit.groups()
        return number + (r"\%" if percent else "")
    if mixed := _MIXED.fullmatch(plain):
        sign, whole, top, bottom = mixed.groups()
        return rf"{sign}({whole} + \frac{{{top}}}{{{bottom}}})"
    if scientific := _SCIENTIFIC.fullmatch(plain):
        return rf"{scientific[1]} \times 10^{{{scientific[2]}}}"
    if _WORDS.fullmatch(plain):
        return rf"\text{{{plain.lower()}}}"
    return "" if _TWO_NUMBERS.search(plain) else plain


def is_huge(text: str) -> bool:
    """Whether `text` has a number that nobody would write out: 9^{9^9}, 2^{100000}, 1000!.

    The usual ways to write one; there are others, so whoever computes with it needs a time limit.
    """
    return _HUGE.search(text) is not None


def bracket_depth(text: str) -> int:
    """How deep the brackets of `text` nest, at most; one that is never closed counts to the end."""
    depth = deepest = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth = max(0, depth - 1)
    return deepest


# What stands around a number in LaTeX and in prices, and is not part of it.
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
