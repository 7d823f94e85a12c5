"""Decimal numbers, fractions, powers and exponents in text: which it states, and which are equal.

Nothing here raises on any text.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

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


_CURRENCY_SIGN = r"(?:US)?\\?\$|[€£¥₹]"
_SPACE = r"(?:,|\{,\}|[\u00a0\u2009\u202f'\u2019]|\\,)"
_PLAIN = rf"(?:[1-9][0-9]{{0,2}}(?:{_SPACE}[0-9]{{3}})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_EXPONENT = r"\{\s*[+-]?[0-9]+\s*\}|\(\s*[+-]?[0-9]+\s*\)|[+-]?[0-9]+"
_TIMES = r"\s*(?:\\times|\\cdot|[×·⋅*xX])\s*"
_STATED = re.compile(
    rf"(?P<sign>(?<![0-9A-Za-z)\]}}])(?!(?<=[0-9)\]}}]\s)[+-]\s)[+-]\s?"
    rf"(?=(?:{_CURRENCY_SIGN})|\\[cdt]?frac|[0-9.]))?"
    rf"(?:{_CURRENCY_SIGN})?\s?(?P<late>(?<=[$€£¥₹])[+-])?"
    rf"(?:(?P<whole>(?:{_PLAIN})\s*)??\\[cdt]?frac\s*(?:\{{\s*(?P<over>-?(?:{_PLAIN}))\s*\}}"
    rf"\s*\{{\s*(?P<under>-?(?:{_PLAIN}))\s*\}}|(?P<short>[1-9]\s*[1-9])(?![0-9]))"
    rf"|(?<![0-9^_])(?P<number>{_PLAIN})"
    rf"(?:[eE](?P<e>[+-]?[0-9]+)(?![0-9A-Za-z])"
    rf"|{_TIMES}10\s*(?:\^|\*\*)\s*(?P<times>{_EXPONENT})"
    rf"|(?:\s*\^\s*|\*\*|\s+\*\*\s+)(?P<power>{_EXPONENT})"
    r"|\s*/\s*(?P<slash>[1-9][0-9]*)(?![0-9]|\.[0-9]|\s*/)"
    r"|[ ](?P<top>[0-9]+)\s*/\s*(?P<bottom>[1-9][0-9]*)(?![0-9]|\.[0-9]|\s*/))?)"
)
# Digits of a unit (m^2, cm2), of an index (x_1) and of a power of a letter are not numbers; those
# of bold text are: "is **5**".
_NOT_NUMBERS = re.compile(
    r"(?<=[A-Za-z)}\]])(?:\s*\^\s*|\*\*|\s+\*\*\s+)(?:\{[^{}]*\}|[+-]?[0-9]+)|_\s*(?:\{[^{}]*\}|[0-9]+)"
    r"|(?<=[0-9 ])(?:[kcdm]?m|ft|in)[23](?![0-9.])"
)
_EMPHASIS = re.compile(r"(?<![0-9A-Za-z)\]}_\\])_{1,2}(?=[-+]?[$0-9])")  # __5__
_MAX_POWER, MAX_DIGITS = 1000, 4000
VULGAR = re.compile(r"(?<=[0-9])(?=[\u00bc-\u00be\u2150-\u215e])")
_WIDE = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | {0x3000: " "}
_HYPHENS = re.compile(r"[\u2010-\u2013\ufe63\u2212]|\u2014(?=\s?[$0-9.])")
_SMALL = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ₀₁₂₃₄₅₆₇₈₉ₙ", "0123456789-+n0123456789n")
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+")
_LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉ₙ]+")


def ascii_digits(text: str) -> str:
    """Full-width characters, dashes before numbers, raised and lowered digits in plain form."""
    narrow = _HYPHENS.sub("-", text.translate(_WIDE))
    narrow = _LOWERED.sub(lambda m: "_{" + m.group().translate(_SMALL) + "}", narrow)
    return _RAISED.sub(lambda m: "^{" + m.group().translate(_SMALL) + "}", narrow)


def stated_numbers(text: str) -> list[str]:
    r"""All numbers of `text` in order: with sign and currency, fractions, powers, exponents.

    "-$5" is -5, "\frac12" and "1/2" are 1/2, "10^3" is 1000, "1.5 × 10^3" is 1500, "3 1/2" is 7/2.
    What is too large to compute is left out.
    """
    plain = _EMPHASIS.sub(" ", VULGAR.sub(" ", ascii_digits(text)))
    plain = re.sub(r"[\u00bc-\u00be\u2150-\u215e]", _spelled, plain)
    plain = _NOT_NUMBERS.sub(" ", plain.replace("\\!", "").replace("\u2044", "/"))
    found = [_reading(match) for match in _STATED.finditer(plain)]
    return [number for number in found if number is not None]


def _spelled(match: re.Match[str]) -> str:
    return unicodedata.normalize("NFKC", match.group()).replace("\u2044", "/")


def _reading(match: re.Match[str]) -> str | None:
    """The number as an integer, a decimal or a fraction."""
    part = match.groupdict()
    if len(match.group()) > MAX_DIGITS and part["number"] != match.group():
        return None
    minus = "-" in ((part["sign"] or "") + (part["late"] or ""))
    sign = "-" if minus else ""
    if part["number"] is None:
        short = part["short"] or "  "
        top, bottom = (_signed(part["over"] or short[0]), _signed(part["under"] or short[-1]))
        if not bottom:
            return None
        value = top / bottom + (Fraction(_digits(part["whole"])) if part["whole"] else 0)
        return str(-value if minus else value)
    number = _digits(part["number"])
    exponent = part["e"] or part["times"]
    if exponent:
        power = int(exponent.strip("{}() "))
        return f"{sign}{number}e{power}" if abs(power) <= _MAX_POWER else None
    if part["power"]:
        power = int(part["power"].strip("{}() "))
        if abs(power) * len(number) > MAX_DIGITS or (power < 0 and not Fraction(number)):
            return None
        return sign + str(Fraction(number) ** power)
    if part["slash"]:
        return f"{sign}{Fraction(number) / int(part['slash'])}"
    if part["top"]:
        return f"{sign}{Fraction(number) + Fraction(int(part['top']), int(part['bottom']))}"
    return sign + number


def _signed(text: str) -> Fraction:
    return Fraction(_digits(text)) * (-1 if text.startswith("-") else 1)


def _digits(text: str) -> str:
    return re.sub(r"[^0-9.]", "", text)


_ONE = re.compile(
    r"[+-]?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"
    r"(?:[eE][+-]?[0-9]{1,4}|/0*[1-9][0-9]*)?"
)


def is_number(text: str) -> bool:
    """Whether `text` is one number: a decimal, with an exponent, or a fraction."""
    return _ONE.fullmatch(ascii_digits(text).strip()) is not None


def same_number(left: str, right: str) -> bool:
    """Whether two strings that hold `is_number` have the same value: 68 and 68.0 do.

    Numbers of more than `MAX_DIGITS` characters are compared as text: Python refuses to read them.
    """
    if max(len(left), len(right)) > MAX_DIGITS:
        return left == right
    return _value(left) == _value(right)


def _value(text: str) -> Fraction:
    plain = ascii_digits(text).strip().replace(",", "")
    top, _, bottom = plain.partition("/")
    return Fraction(top.rstrip(".")) / (Fraction(bottom) if bottom else 1)


def _ascii_minus(text: str) -> str:
    # U+2212 is the minus sign of typeset mathematics.
    return text.replace("\u2212", "-")
