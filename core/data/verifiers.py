"""How an answer is compared with a response: by name, and by the data set that a row comes from."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Literal, get_args

from posttrain.core.math.answers import (
    after_marker,
    as_latex,
    final_number,
    has_unfinished_box,
    large_integer,
    last_boxed,
    last_number,
    normal,
    without_blanks,
)
from posttrain.core.math.brackets import as_interval, parts
from posttrain.core.math.closed_forms import read_closed_form
from posttrain.core.math.numbers import is_number, same_number
from posttrain.core.types import Verdict

Match = Literal["exact", "last_number", "final_number", "contains", "math", "none"]
MATCHES: tuple[Match, ...] = get_args(Match)
NUMERIC = ("last_number", "final_number")
DEFAULT = "default"
"""Key of `verifiers` for every data set that nothing else names."""

KNOWN: tuple[tuple[str, Match], ...] = (
    ("*gsm8k*", "final_number"),
    ("*geometry3k*", "math"),
    ("*math*", "math"),
    ("*aime*", "math"),
    ("*amc*", "math"),
    ("*olympiad*", "math"),
    ("numina*", "math"),
    ("*dapo*", "math"),
    ("*deepscaler*", "math"),
    ("*codecontests*", "none"),
    ("*codeforces*", "none"),
    ("*livecodebench*", "none"),
    ("*humaneval*", "none"),
    ("*mbpp*", "none"),
    ("apps", "none"),
    ("taco", "none"),
)
"""Data sets by pattern of their lower-case name. Programs have no verdict: a reward runs them."""

_ANSWER_LINE = re.compile(r"(?im)^.*\banswer(?:\s+is)?\s*:\s*(\S.*)$")
_UNIT = re.compile(r"\\(?:text|mbox|mathrm)\{\s(?!or |at )[^{}]*\}(?:\^\{?\d\}?)?$")
_WORDS = re.compile(r"\\(?:text|textbf|mbox|mathrm)\{([^{}]*)\}")
# 3\frac{1}{2} is 3 + 1/2: a closed form of it would be the product.
_MIXED = re.compile(
    r"(?<![0-9.])([0-9]+)\s*(\\[cdt]?frac\s*(?:\{\s*[0-9]+\s*\}\s*\{\s*[0-9]+\s*\}|[1-9][1-9](?![0-9])))"
)
MAX_ANSWER = 1000
"""Characters of an answer that are compared as mathematics."""


def verifier_of(data_source: str, given: Mapping[str, Match]) -> Match | None:
    """The verifier of a data set: what `given` says of its name, then of a pattern, then what is
    known of it, then `given`'s default; None when nothing says."""
    if data_source in given:
        return given[data_source]
    name = data_source.lower()
    patterns = [(key.lower(), match) for key, match in given.items() if key != DEFAULT]
    for pattern, match in (*patterns, *KNOWN):
        if fnmatchcase(name, pattern):
            return match
    return given.get(DEFAULT)


def verdict(match: Match, answer: str, text: str) -> Verdict:
    """Whether `text` answers what `answer` answers; white space around an answer counts nothing."""
    return _VERIFIERS[match](answer.strip(), text)


def _exact(answer: str, text: str) -> Verdict:
    stripped = text.strip()
    return Verdict(float(stripped == answer), stripped or None)


def _contains(answer: str, text: str) -> Verdict:
    found = answer in text
    return Verdict(float(found), answer if found else None)


def _number(read: Callable[[str], str | None]) -> Callable[[str, str], Verdict]:
    def compared(answer: str, text: str) -> Verdict:
        found = read(text)
        return Verdict(float(found is not None and same_number(found, answer)), found)

    return compared


def _math(answer: str, text: str) -> Verdict:
    found = _stated(text)
    if found is None:
        return Verdict(0.0, None)
    boxed = last_boxed(answer)
    return Verdict(float(same_math(answer if boxed is None else boxed, found)), found)


def _none(answer: str, text: str) -> Verdict:
    return Verdict(0.0, None)


_VERIFIERS: dict[Match, Callable[[str, str], Verdict]] = {
    "exact": _exact,
    "last_number": _number(last_number),
    "final_number": _number(final_number),
    "contains": _contains,
    "math": _math,
    "none": _none,
}


def _stated(text: str) -> str | None:
    r"""The final answer of a response: in the last \boxed{}, on the last line `Answer: ...`, after
    the last ####, else its last number."""
    boxed = last_boxed(text)
    if boxed is not None or has_unfinished_box(text):
        return boxed
    lines = _ANSWER_LINE.findall(text)
    found = lines[-1] if lines else after_marker(text, "####")
    return found.strip() if found else last_number(text)


def same_math(left: str, right: str) -> bool:
    r"""Whether two answers are equal as texts, numbers, closed forms, or part for part.

    1/2, 0.5 and \frac{1}{2} are equal, and so are {1, 2} and {2, 1}; algebra is not done.
    """
    if max(len(left), len(right)) > MAX_ANSWER:
        return left.strip() == right.strip()
    one, other = normal(_undressed(left)), normal(_undressed(right))
    if without_blanks(one) == without_blanks(other) or without_blanks(
        as_latex(left)
    ) == without_blanks(as_latex(right)):
        return bool(one)
    if is_number(one) and is_number(other):
        return same_number(one, other)
    large = large_integer(one), large_integer(other)
    if None not in large:
        return large[0] == large[1]
    first, second = parts(as_interval(one)), parts(as_interval(other))
    if first[0] and second[0] and len(first[2]) > 1 and len(second[2]) > 1:
        return first[:2] == second[:2] and _same_parts(first[2], second[2], first[0] == "{")
    return _same_value(_MIXED.sub(r"(\1+\2)", one), _MIXED.sub(r"(\1+\2)", other))


def _undressed(answer: str) -> str:
    r"""The answer without the unit behind it, \text{...} around it and a per cent sign."""
    plain = _WORDS.sub(r"\1", _UNIT.sub("", answer.strip().strip("$")))
    return plain.strip().rstrip("%").rstrip("\\")


def _same_parts(left: list[str], right: list[str], any_order: bool) -> bool:
    if not any_order:
        return len(left) == len(right) and all(map(same_math, left, right))
    return all(any(same_math(a, b) for b in right) for a in left) and all(
        any(same_math(a, b) for a in left) for b in right
    )


def _same_value(left: str, right: str) -> bool:
    one, other = read_closed_form(left), read_closed_form(right)
    if one is None or other is None:
        return False
    import sympy  # half a second, and only closed forms need it

    gap = sympy.N(one - other, 30, maxn=200)
    return bool(gap.is_number and abs(gap) < sympy.Float(10) ** -25)
