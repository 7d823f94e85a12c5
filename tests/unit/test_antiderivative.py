"""Antiderivatives, checked by numbers and without running what somebody wrote."""

from __future__ import annotations

import time

import pytest

from posttrain.core.math.antiderivative import FUNCTIONS, is_antiderivative

RIGHT = [
    ("x**3/3 + C", "x**2"),
    ("x**3/3 - 7", "x*x"),
    ("-cos(3*x)/3", "sin(3*x)"),
    ("log(x) + C", "1/x"),
    ("x*exp(x) - exp(x)", "x*exp(x)"),
    ("atan(x/2)/2", "1/(x**2 + 4)"),
    ("2**x/log(2)", "2**x"),
    ("sin(x)**2/2", "sin(x)*cos(x)"),
    ("-cos(x)**2/2", "sin(x)*cos(x)"),
    ("C", "0"),
]


@pytest.mark.parametrize(("answer", "integrand"), RIGHT)
def test_right_ones_in_any_wording(answer: str, integrand: str) -> None:
    assert is_antiderivative(answer, integrand, "x")
    assert not is_antiderivative(f"{answer} + x/1000", integrand, "x")


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_the_derivative_of_each_function_is_its_own(name: str) -> None:
    function, derivative = FUNCTIONS[name]
    at, step = 0.61 + 0.23j, 1e-6
    slope = (function(at + step) - function(at - step)) / (2 * step)
    assert derivative(at) == pytest.approx(slope, rel=1e-8)


WRONG = ["", "x**2/2 +", "y", "x.real", "__import__('os')", "exit()", "x if 1 else 0", "[x][0]"]


@pytest.mark.parametrize(
    "text", [*WRONG, "True", "'x'", "log(x, 2)", "x^2/2", "1/0", "x\n+1", "\0"]
)
def test_what_is_no_such_expression_is_wrong(text: str) -> None:
    assert not is_antiderivative(text, "x", "x")


@pytest.mark.parametrize("text", ["9**9**9**9*x", "(" * 400, "x" + "+x" * 499, "-" * 900 + "x"])
def test_no_text_takes_long(text: str) -> None:
    began = time.monotonic()
    assert not is_antiderivative(text, "x", "x")
    assert time.monotonic() - began < 1
