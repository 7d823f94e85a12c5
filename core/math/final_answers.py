"""Where a text gives its final answer, and that answer as a LaTeX expression.

Nothing here raises on any text.
"""

from __future__ import annotations

import re
import unicodedata

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
