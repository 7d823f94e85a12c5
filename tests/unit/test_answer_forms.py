"""Which answers are harmless to evaluate, and that all others are distinguished."""

from __future__ import annotations

import pytest

from posttrain.core.math.answer_forms import is_arithmetic, is_data, is_polynomial

CODE = [
    "exit()",
    "__import__('os')",
    "a.b",
    "x[0](1)",
    "f'{x}'",
    "(lambda: 1)()",
    "x := 1",
    "'a'*9",
]


@pytest.mark.parametrize(
    "text", [*CODE, "[a for a in b]", "[1" * 60, "[" * 60 + "]" * 60, "1" * 2001]
)
def test_what_is_more_than_words_and_literals_is_no_data(text: str) -> None:
    assert not is_data(text)


@pytest.mark.parametrize("text", ["", "0 1\n1 0", "_ Q _", "[[0, 1], ['a', -2.5]]", '["1", "2"]'])
def test_words_and_literals_are_data(text: str) -> None:
    assert is_data(text)


@pytest.mark.parametrize("text", [*CODE, "9**9", "9 ** 9", "2^3", "x+1", "1e9", "1" * 13, "9!"])
def test_what_is_more_than_four_operations_is_no_arithmetic(text: str) -> None:
    assert not is_arithmetic(text)


@pytest.mark.parametrize("text", ["(1+2)*3/4 - 5", "1.5", "7//2", "((1))"])
def test_four_operations_are_arithmetic(text: str) -> None:
    assert is_arithmetic(text)


POWERS = ["x**100", "9**9", "(x)**2", "x**2**2", "x**-2", "x**y", "sin(x)", "E", "N(1)", "xy"]


@pytest.mark.parametrize("text", [*CODE, *POWERS])
def test_what_could_grow_or_be_called_is_no_polynomial(text: str) -> None:
    assert not is_polynomial(text)


@pytest.mark.parametrize(
    "text", ["x**2*y + 3*x*y - 4", "6*x**15 + 2", "-(a - b)*(a + b)", "x ** 3"]
)
def test_sums_of_products_of_letters_are_polynomials(text: str) -> None:
    assert is_polynomial(text)
