"""Answers as people write them, in tables, and what is read from them."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from posttrain.core.math.answers import final_number, last_number
from posttrain.core.math.numbers import is_number, same_number
from posttrain.plugins.rewards.math_accuracy import Graded, in_bounded_time
from tests.helpers.rewards import pooled, sample, score

DATA = Path(__file__).resolve().parents[1] / "data"


def table(name: str) -> list[tuple[str, str, float]]:
    lines = (DATA / name).read_text("utf-8").splitlines()
    rows = [line.split("\t") for line in lines]
    return [(reference, written, float(value)) for reference, written, value in rows]


def test_mathematical_answers_in_a_box() -> None:
    rows = table("math_answers.tsv")
    with pooled("math_accuracy") as scores:
        found = scores([sample(f"so \\boxed{{{w}}}.", r) for r, w, _ in rows])
    wrong = [(row, one) for row, one in zip(rows, found, strict=True) if one.value != row[2]]
    assert len(rows) >= 150 and not wrong


@pytest.mark.parametrize(
    "form", ["{n}", "-{n}", "{n}/3", "1/{n}", "{n} 1/2", "2^{n}", "1e{n}", "\\frac{{{n}}}{{3}}"]
)
@pytest.mark.parametrize("around", ["{}", "#### {}", "\\boxed{{{}}}", "\\boxed{{\\text{{{}}}}}"])
@pytest.mark.parametrize("digits", [20, 4200, 5000])
def test_no_number_is_too_long_to_be_read_or_left_out(form: str, around: str, digits: int) -> None:
    for text in (form.format(n="9" * digits), "9" * 20 + "^1000"):
        for read in (last_number, final_number):
            found = read(around.format(text))
            assert found is None or not same_number(found, "7")


def test_the_last_number_of_a_text() -> None:
    rows = table("last_numbers.tsv")
    wrong = []
    for answer, text, value in rows:
        found = last_number(text)
        if (found is not None and same_number(found, answer)) != bool(value):
            wrong.append((answer, text, found))
    assert len(rows) >= 80 and not wrong


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### -$8", "-8"),
        ("#### $-8", "-8"),
        ("#### 2,160", "2160"),
        ("\\boxed{2{,}160}", "2160"),
        ("\\boxed{8 \\text{ m}^2}", "8"),
        ("\\boxed{y=8}", "8"),
        ("\\boxed{\\$8}", "8"),
        ("\\boxed{10^4}", None),
        ("\\boxed{\\frac{1}{2}}", None),
        ("#### 2e3", "2000"),
        ("#### 48 + 24 = 72", "72"),
        ("#### $48 + $24 = $72", "72"),
        ("#### <<48+24=72>>72", "72"),
        ("#### 72 (since 72/3 = 24)", "72"),
        ("#### 72 = clips", "72"),
        ("\\boxed{3}, but \\boxed{", None),
        ("\\boxed{3}, but \\boxed{7", "7"),
        ("####\n8", "8"),
        ("#### − 8", "-8"),
        ("#### 16/2", "8"),
        ("\\boxed{\\text{8}}", "8"),
        ("\\boxed{\\text{8 apples}}", "8"),
    ],
)
def test_the_final_number_of_gsm8k(text: str, number: str | None) -> None:
    found = final_number(text)
    assert found is None if number is None else found is not None and same_number(found, number)


@pytest.mark.parametrize("value", [2e-07, 3e16, 0.1, 7, 10**30, -0.5, 1e-300])
def test_numbers_of_json_are_numbers(value: float) -> None:
    assert is_number(str(value)) and same_number(str(value), repr(value))


def test_an_answer_whose_last_box_is_not_closed_is_none() -> None:
    assert score("math_accuracy", sample("\\boxed{3}, but \\boxed{", "3")).value == 0.0


ENDLESS = ["(x+1)^{999}(x+2)^{999}", "\\int_0^1 x^{x^x} dx", "\\sum_{k=1}^{999999} \\frac{1}{k^k}",
           "\\prod_{k=1}^{9999} (x+k)", "((x^{99}+1)^{99}+1)^{99}", "999!^{99}"]  # fmt: skip


@pytest.mark.alone
@pytest.mark.parametrize("sessions", [0, 16])
def test_algebra_that_does_not_end_is_a_zero_within_a_second(sessions: int) -> None:
    """By the clock, also next to busy processes that Linux gives as much time as the worker."""
    with pooled("math_accuracy") as scores, ExitStack() as stack:
        assert scores([sample("\\boxed{x+1}", "1+x")])[0].value == 1.0
        for _ in range(sessions):
            command = [sys.executable, "-c", "while True: pass"]
            busy = subprocess.Popen(command, start_new_session=True)
            stack.callback(busy.wait)
            stack.callback(busy.kill)
        for written in ENDLESS:
            begin = time.monotonic()
            found = scores([sample(f"\\boxed{{{written}}}", "x+1")])[0]
            assert time.monotonic() - begin < 1.0, written
            assert found.value == 0.0 and found.status == "ok" and found.detail, written


@pytest.mark.alone
def test_what_ended_a_comparison_is_said() -> None:
    def busy() -> Graded:
        while True:
            pass

    def waiting() -> Graded:
        time.sleep(60)
        raise AssertionError

    assert in_bounded_time(busy) == (0.0, "ok", "no answer found: the algebra did not end")
    asleep = in_bounded_time(waiting)
    assert asleep == (0.0, "ok", "no answer found: busy machine, 0.0 s of it in 0.8 s")


def test_an_answer_between_tags_is_read() -> None:
    text = "<think>perhaps 7</think> <answer>5</answer>"
    assert [score("math_accuracy", sample(text, one)).value for one in ("5", "7")] == [1.0, 0.0]
