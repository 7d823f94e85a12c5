"""Closed forms become questions after an integer: what is read, what is asked, what is refused."""

from __future__ import annotations

from fractions import Fraction
from math import isqrt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.math.closed_forms import integer_question, plain_integer


@pytest.mark.parametrize(
    ("text", "form", "answer"),
    [
        (r"11-2\sqrt{6}", r"k - m\sqrt{n}", 19),  # the example of DAPO's appendix
        (r"\frac{3}{4}", "m/n", 7),
        (r"$\dfrac{-6}{8}$", "m/n", 1),
        ("0.25", "m/n", 5),
        ("1/3 + 1/6", "m/n", 3),
        ("1,200.5", "m/n", 2403),
        (r"3\sqrt{8}", r"m\sqrt{n}", 8),
        ("-√2", r"-m\sqrt{n}", 3),
        ("(1+sqrt(5))/2", r"(k + m\sqrt{n})/d", 9),
        (r"\frac{2+\sqrt{12}}{4}", r"(k + m\sqrt{n})/d", 7),
        (r"\frac{1}{\sqrt{2}}", r"(m\sqrt{n})/d", 5),
        (r"\left(\sqrt{3}+1\right)\cdot\left(\sqrt{3}-1\right)", "integer", 2),
        (r"\frac{8}{2}", "integer", 4),
        ("1,200", "integer", 1200),
    ],
)
def test_a_closed_form_is_asked_for_as_an_integer(text: str, form: str, answer: int) -> None:
    found = integer_question(text)
    assert found is not None
    assert (found.form, found.answer) == (form, answer)
    assert (found.instruction == "") == (form == "integer")
    if form not in ("integer", "m/n"):
        assert form in found.instruction


@pytest.mark.parametrize(
    "text",
    [
        "x + 1",
        "3 cm",
        "2 1/2",
        "(3, 4)",
        r"\pi",
        r"\sqrt{2}+\sqrt{3}",
        r"\sqrt{2\sqrt{2}}",
        r"\sqrt{-4}",
        "1/0",
        r"\frac{1}{0}",
        r"\frac{1}{\sqrt{2}-\sqrt{2}}",
        "__import__('os').getcwd()",
        "9" * 13,
        "(" * 150,
        "1" + "+1" * 100,
        "2**3",
        "()",
        "",
    ],
)
def test_what_no_rule_fits_is_left_alone(text: str) -> None:
    assert integer_question(text) is None


@settings(max_examples=40, deadline=None)
@given(
    st.integers(-50, 50),
    st.integers(1, 50),
    st.integers(1, 30),
    st.integers(2, 60),
)
def test_the_integers_are_those_of_the_lowest_terms(k: int, d: int, m: int, n: int) -> None:
    found = integer_question(rf"\frac{{{k}}}{{{d}}}")
    plain = Fraction(k, d)
    assert found is not None
    whole = plain.denominator == 1
    assert found.answer == plain.numerator + (0 if whole else plain.denominator)
    if isqrt(n) ** 2 != n and all(n % (q * q) for q in range(2, 8)):
        surd = integer_question(rf"{k}+{m}\sqrt{{{n}}}")
        assert surd is not None and surd.answer == k + m + n


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="0123456789+-*/(){}\\sqrtfacd√.,$ ", max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    found = integer_question(text)
    assert found is None or isinstance(found.answer, int)


def test_integers_as_text() -> None:
    assert [plain_integer(t) for t in ("72", " 1,080 ", "72.0", "-0", "9" * 40)] == [
        "72",
        "1080",
        "72",
        "0",
        "9" * 40,
    ]
    assert [plain_integer(t) for t in ("72.5", "six", "", "1/2", "9" * 5000)] == [None] * 5
