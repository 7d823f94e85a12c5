"""Closed forms that an answer may have, as sympy numbers, and as a question after an integer.

What is read here comes from data sets: it is parsed by this module's own grammar and never handed
to sympy as text, which sympy would evaluate.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from posttrain.core.math.numbers import is_number, numbers_in

MAX_LENGTH = 200
"""Characters of an answer that is looked at; a longer one is not a closed form."""
MAX_DIGITS = 12
"""Digits of a number: a root of more could take long to simplify."""
PRECISION = 30
"""Digits to which a rewritten form must agree with the original."""

Number = Any  # Any: sympy is not typed

_TOKEN = re.compile(r"\s*(\d+(?:\.\d+)?|\\frac|\\sqrt|sqrt|\\cdot|\\times|[-+*/(){}√])")
_PLAIN = (
    (re.compile(r"\\[dt]frac"), r"\\frac"),
    (re.compile(r"\\left|\\right|\\[,!;: ()]|\$|\\$"), ""),
    (re.compile(r"(?<=\d)\{?,\}?(?=\d{3}(?!\d))"), ""),
    (re.compile("\u2212"), "-"),
)


class _NoForm(Exception):
    """The text is not a closed form of this grammar."""


@dataclass(frozen=True, slots=True)
class IntegerQuestion:
    """How an answer becomes an integer: what to add to the question, and the answer then."""

    form: str
    instruction: str
    answer: int


def read_closed_form(text: str) -> Number | None:
    r"""The number that `text` writes, unsimplified; None for anything but + - * / \frac and roots.

    "11-2\sqrt{6}", "\frac{3}{4}", "(1+sqrt(5))/2", "0.25", "1,200" are read; "x+1" and "3 cm" not.
    """
    for pattern, plain in _PLAIN:
        text = pattern.sub(plain, text)
    if not text.strip() or len(text) > MAX_LENGTH:
        return None
    try:
        return _Parser(_tokens(text)).whole()
    except (_NoForm, ZeroDivisionError, RecursionError):
        return None


def plain_integer(text: str) -> str | None:
    """The integer that `text` writes as a decimal number (72, 72.0, 1,080), else None."""
    if not is_number(text) or len(text) > MAX_LENGTH or re.search("[/eE]", text):
        return None
    value = Decimal(numbers_in(text)[0])
    return str(int(value)) if value == value.to_integral_value() else None


def integer_question(text: str) -> IntegerQuestion | None:
    """The integer to ask for instead of `text`; None when no rule fits.

    Rules: an integer as it is; a rational in lowest terms; (k + m sqrt(n)) / d with n free of
    squares. The integers found are put together again and must agree with `text` to 30 digits.
    """
    import sympy

    value = read_closed_form(text)
    if value is None:
        return None
    simple = sympy.radsimp(sympy.expand(value))
    found = _rational(simple) if simple.is_Rational else _surd(simple)
    if found is None:
        return None
    question, again = found
    gap = sympy.N(value - again, PRECISION, maxn=400)
    return question if abs(gap) < sympy.Float(10) ** (5 - PRECISION) else None


def _rational(value: Number) -> tuple[IntegerQuestion, Number]:
    top, bottom = int(value.p), int(value.q)
    if bottom == 1:
        return IntegerQuestion("integer", "", top), value
    reported = (
        "The answer can be written as m/n, where m and n are integers without a common factor and "
        "n > 0. Give the value of m + n."
    )
    return IntegerQuestion("m/n", reported, top + bottom), _ratio(top, bottom)


def _surd(value: Number) -> tuple[IntegerQuestion, Number] | None:
    import sympy

    parts = value.as_coefficients_dict()
    roots = [root for root in parts if root != 1]
    if len(roots) != 1 or not all(part.is_Rational for part in parts.values()):
        return None
    squared = roots[0] ** 2
    if not squared.is_Integer or squared < 2:
        return None
    left, right, root = parts.get(sympy.Integer(1), sympy.Integer(0)), parts[roots[0]], int(squared)
    bottom = int(sympy.ilcm(left.q, right.q))
    k, m = int(left * bottom), int(right * bottom)
    sign = "-" if m < 0 else "+"
    top = f"k {sign} m\\sqrt{{n}}" if k else ("-" if m < 0 else "") + "m\\sqrt{n}"
    form = top if bottom == 1 else f"({top})/d"
    names = [name for name, there in (("k", k), ("m", m), ("n", 1), ("d", bottom > 1)) if there]
    shared = "k, m and d" if k else "m and d"
    reported = (
        f"The answer can be written as {form}, where {', '.join(names)} are integers, m > 0"
        + (f", d > 0, {shared} have no common factor" if bottom > 1 else "")
        + ", and n is divisible by no square but 1. "
        f"Give the value of {' + '.join(names)}."
    )
    answer = k + abs(m) + root + (bottom if bottom > 1 else 0)
    again = (k + m * sympy.sqrt(root)) / sympy.Integer(bottom)
    return IntegerQuestion(form, reported, answer), again


def _ratio(top: int, bottom: int) -> Number:
    import sympy

    return sympy.Integer(top) / sympy.Integer(bottom)


def _tokens(text: str) -> list[str]:
    found, position, end = [], 0, len(text.rstrip())
    while position < end:
        match = _TOKEN.match(text, position)
        if match is None:
            raise _NoForm
        found.append(match[1])
        position = match.end()
    return found


class _Parser:
    """Recursive descent over sums, products, fractions and square roots."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens, self.position = tokens, 0

    def whole(self) -> Number:
        value = self.sum()
        if self.position != len(self.tokens):
            raise _NoForm
        return value

    def sum(self) -> Number:
        value = self.product()
        while self.peek() in ("+", "-"):
            sign = 1 if self.take() == "+" else -1
            value += sign * self.product()
        return value

    def product(self) -> Number:
        value = self.factor()
        while (token := self.peek()) not in ("", "+", "-", ")", "}"):
            if token in ("*", "\\cdot", "\\times"):
                self.take()
                value *= self.factor()
            elif token == "/":
                self.take()
                value = self.divided(value, self.factor())
            elif token[0].isdigit():  # "3 4" and "2 1/2" are no products
                raise _NoForm
            else:
                value *= self.factor()
        return value

    def factor(self) -> Number:
        import sympy

        token = self.take()
        if token in ("+", "-"):
            return self.factor() * (1 if token == "+" else -1)
        if token in ("(", "{"):
            value = self.sum()
            self.expect(")" if token == "(" else "}")
            return value
        if token == "\\frac":
            top = self.braced()
            return self.divided(top, self.braced())
        if token in ("\\sqrt", "sqrt", "√"):
            value = self.factor()
            if not value.is_nonnegative:
                raise _NoForm
            return sympy.sqrt(value)
        if token[:1].isdigit() and len(token) <= MAX_DIGITS:
            return sympy.Rational(token)
        raise _NoForm

    def braced(self) -> Number:
        self.expect("{")
        value = self.sum()
        self.expect("}")
        return value

    def divided(self, top: Number, bottom: Number) -> Number:
        if bottom.is_zero is not False:
            raise _NoForm
        return top / bottom

    def peek(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def take(self) -> str:
        token = self.peek()
        self.position += 1
        return token

    def expect(self, token: str) -> None:
        if self.take() != token:
            raise _NoForm
