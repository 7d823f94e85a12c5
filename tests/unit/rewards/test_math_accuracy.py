"""The reward `"math_accuracy"`: what it reads, what it takes for equal, what it cannot read."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import math_verify
import pytest
import sympy

from posttrain.core.math.answers import after_marker, as_latex, bracket_depth, last_boxed
from posttrain.core.types import Score
from posttrain.plugins.rewards.math_accuracy import Graded, in_bounded_time
from tests.helpers.rewards import pooled, sample, score

GSM8K = Path(__file__).resolve().parents[4] / "shared" / "data" / "gsm8k"


Grade = Callable[[str, str], Score]


@pytest.fixture(scope="module")
def graded() -> Iterator[Grade]:
    """The score of a text, of a problem with that answer."""
    with pooled("math_accuracy") as scores:
        yield lambda answer, text: scores([sample(text, answer)])[0]


def graded_here(answer: str, text: str, **fields: object) -> Score:
    """The same in this process."""
    return score("math_accuracy", sample(text, answer), **fields)


@pytest.mark.parametrize(
    "text",
    [
        "48 / 2 = 24\n48 + 24 = 72\n#### 72",
        "####72",
        "#### 72.",
        "#### $72",
        "#### \\$72",
        "#### 72.00",
        "#### 72 clips",
        "#### 72 dollars.",
        "#### **72**",
        "#### 144/2",
        "#### $\\frac{144}{2}$",
        "#### 7.2e1",
        "#### x = 72",
        "#### 71\nno, wait\n#### 72",
        "#### 72\nThat took 5 steps.",
        "so \\boxed{72}",
        "\\boxed{3}, no, \\boxed{72\\text{ clips}}",
        "\\boxed{\\boxed{72}}",
        "The answer is 72.",
        "The final answer is $72$. I hope it is correct.",
        "48+24=72",
        "72",
    ],
)
def test_an_answer_of_72_is_read_however_it_is_written(graded: Grade, text: str) -> None:
    assert graded("72", text) == Score(1.0)


@pytest.mark.parametrize(
    ("answer", "written"),
    [
        ("1234", "1,234"),
        ("1,234", "1234"),
        ("1234", "1 234"),
        ("1234", "1\\,234"),
        ("1234", "1{,}234"),
        ("1,234,567.5", "1234567.50"),
        ("-5", "-5"),
        ("-5", "\u22125"),  # the minus of typeset mathematics
        ("0.5", "\u00bd"),
        ("0.5", ".5"),
        ("3.5", "3 1/2"),
        ("3.5", "3\u00bd"),
        ("-3.5", "-3 1/2"),
        ("7/2", "3\\frac{1}{2}"),
        ("\\frac{1}{3}", "1/3"),
        ("\\frac{1}{3}", "\\dfrac13"),
        ("50", "50%"),
        ("0.5", "50\\%"),
        ("18", "$18.00"),
        ("5", "\u20ac5"),
        ("1000", "1e3"),
        ("0.0015", "1.5 \\times 10^{-3}"),
        ("12", "12 \\text{ cm}^2"),
        ("12", "12 cm^2"),
        ("\\sqrt{2}", "\\sqrt 2"),
        ("x^2-1", "(x-1)(x+1)"),
        ("(1,2)", "\\left(1, 2\\right)"),
        ("\\{1,2\\}", "2, 1"),
        ("\\infty", "\\infty"),
        ("blue", "Blue"),
        ("Yes", "yes."),
        ("-1", "e^{i\\pi}"),
        ("-1", "\\mathrm{i}^2"),
        ("3+4i", "4i + 3"),
        ("\\frac{1+i}{2}", "0.5 + 0.5i"),
        ("2i", "\\sqrt{-4}"),
        ("-i", "\\frac{1}{i}"),
        ("\\{i, -i\\}", "-i, i"),
        ("e^{i\\pi/3}", "\\frac{1}{2} + \\frac{\\sqrt{3}}{2}i"),
        (
            "\\begin{pmatrix} i & 0 \\\\ 0 & i^2 \\end{pmatrix}",
            "\\begin{pmatrix} i & 0 \\\\ 0 & -1 \\end{pmatrix}",
        ),
        ("2 < i", "i > 2"),
    ],
)
def test_equal_answers_are_equal_after_a_marker_and_in_a_box(
    graded: Grade, answer: str, written: str
) -> None:
    assert graded(answer, f"#### {written}").value == 1.0
    assert graded(answer, f"so \\boxed{{{written}}}").value == 1.0


@pytest.mark.parametrize(
    ("answer", "text", "detail"),
    [
        ("72", "#### 71", "read 71"),
        ("72", "#### -72", "read -72"),
        ("72", "72, or not?\n#### 5", "read 5"),  # the marker comes before all else
        ("72", "#### 1, 72", "read {1, 72}"),  # not one answer
        ("72", "#### 71 or 72", "read {71, 72}"),
        ("77", "#### 5 72", "no answer found"),  # math-verify alone reads 5 + 72
        ("72", "####", "no answer found"),
        ("72", "\\boxed{}", "no answer found"),
        ("72", "\\boxed{72", "no answer found"),  # cut off
        ("72", "", "no answer found"),
        ("72", "\x00 \U0001f600", "no answer found"),
        ("72", "\u0667\u0662", "no answer found"),  # Arabic digits without a marker
        ("1/3", "#### 0.333", "read 0.333000000000000"),
        ("(1,2)", "\\boxed{(2,1)}", "read (2,1)"),
        ("Yes", "#### No", "read no"),
        ("1-2i", "#### 1+2i", "read 1 + 2*I"),
        ("e^{i\\pi}", "#### 1", "read 1"),
    ],
)
def test_a_wrong_or_missing_answer_is_0_and_says_what_was_read(
    graded: Grade, answer: str, text: str, detail: str
) -> None:
    assert graded(answer, text) == Score(0.0, detail=detail)


@pytest.mark.parametrize("answer", ["", "((", "\\frac{"])
def test_a_reference_that_cannot_be_read_is_an_error_and_no_zero(
    graded: Grade, answer: str
) -> None:
    found = graded(answer, "#### 5")
    assert (found.value, found.status) == (None, "error")
    assert found.detail.startswith("reference answer cannot be read")


def test_the_place_to_read_can_be_fixed() -> None:
    text = "\\boxed{1}\n#### 2\nand 3"
    for read, right in (("auto", "2"), ("marker", "2"), ("boxed", "1"), ("last", "3")):
        assert graded_here(right, text, read=read).value == 1.0
    for read in ("marker", "boxed"):
        assert graded_here("3", "and 3", read=read).detail == "no answer found"
    assert graded_here("26", "13 * 2 = 26\nA: 26", marker="A:").value == 1.0


def test_only_the_end_of_a_huge_text_is_read(graded: Grade) -> None:
    assert graded("5", "#### 5" + "a" * 100_000).detail == "no answer found"
    assert graded("5", "1 + " * 100_000 + "\n#### 5").value == 1.0
    assert graded("5", "\\boxed{" * 30_000).value == 0.0


MONSTERS = [
    *("9^{9^{9^{9}}}", "9^9^9", "(9^9)^9", "9**9**9", "2^{10000000}", "10^{(10^{10})}", "1000000!"),
    "(" * 900,  # seconds of parsing
]


@pytest.mark.parametrize("written", MONSTERS)
def test_what_is_too_large_to_compute_never_reaches_the_parser(
    written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse = math_verify.parse

    def guarded(text: str, *rest: object, **named: object) -> object:
        assert written not in text
        return parse(text, *rest, **named)

    monkeypatch.setattr(math_verify, "parse", guarded)
    for text in (f"#### {written}", f"\\boxed{{{written}}}", f"so ${written}$"):
        assert graded_here("5", text) == Score(0.0, detail="no answer found")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("B", 1.0),
        ("**B**", 1.0),
        ("The answer is (B).", 1.0),
        ("The correct answer is **B**: because", 1.0),
        ("Answer: $\\text{(B)}$", 1.0),
        ("The answer is A. Wait, the answer is B.", 1.0),
        ("The answer is B. Wait, the answer is A.", 0.0),
        ("The answer is B or C.", 0.0),
        ("The answer is B = 5.", 0.0),
        ("B is wrong", 0.0),
    ],
)
def test_a_choice_is_read_from_a_sentence(graded: Grade, text: str, value: float) -> None:
    assert graded("B", text).value == value
    assert graded("A", "The answer is A cat.").value == 0.0


def test_powers_and_factorials_of_ordinary_size_are_computed(graded: Grade) -> None:
    for answer, written in (("1024", "2^{10}"), ("10^9", "10^{9}"), ("120", "5!")):
        assert graded(answer, f"#### {written}").value == 1.0
    assert graded("x^4 + 3^2", "#### 9 + x^{4}").value == 1.0


def test_it_works_outside_the_main_thread_and_sets_no_alarm() -> None:
    found: list[float | None] = []
    before = signal.getsignal(signal.SIGALRM)
    thread = threading.Thread(target=lambda: found.append(graded_here("72", "#### 72").value))
    thread.start()
    thread.join(60)
    assert found == [1.0]
    assert signal.getsignal(signal.SIGALRM) is before


def test_where_a_text_has_its_answer() -> None:
    assert after_marker("a #### 1\nb #### 2 \nc", "####") == "2"
    assert after_marker("a", "####") is None
    assert last_boxed("\\boxed{\\frac{1}{2}} and \\fbox {x\\}}") == "x\\}"
    assert last_boxed("\\boxed{1} \\boxed{2") is None
    assert last_boxed("no box") is None
    assert as_latex("5 apples.") == "5" and as_latex("-3 1/2") == "-(3 + \\frac{1}{2})"
    assert as_latex("x + 1") == "x + 1" and as_latex("1 2") == ""
    assert [bracket_depth(t) for t in ("", "()[]", "([{", ")(")] == [0, 1, 3, 1]


@pytest.mark.skipif(not GSM8K.is_dir(), reason="needs ../shared/data/gsm8k")
@pytest.mark.parametrize(
    "stride", [pytest.param(40, id="sample"), pytest.param(1, id="all", marks=pytest.mark.slow)]
)
def test_gsm8k_answers_are_right_for_their_problem_and_wrong_for_the_next(stride: int) -> None:
    lines = (GSM8K / "train.jsonl").read_text("utf-8").splitlines()[::stride]
    worked = [json.loads(line)["answer"] for line in lines]
    answers = [text.rpartition("####")[2].strip() for text in worked]
    own = [sample(text, answer) for text, answer in zip(worked, answers, strict=True)]
    with pooled("math_accuracy") as scores:
        assert {s.value for s in scores(own)} == {1.0}
        others = answers[1:] + answers[:1]
        wrong = [
            (sample(text, other), float(other.replace(",", "") == answer.replace(",", "")))
            for text, answer, other in zip(worked, answers, others, strict=True)
        ]
        found = scores([one for one, _ in wrong])
    assert [s.value for s in found] == [wanted for _, wanted in wrong]


def test_a_fault_of_ours_is_an_error_and_one_of_the_algebra_a_wrong_answer() -> None:
    def ours() -> Graded:
        raise KeyError("ours")

    def algebra() -> Graded:
        sympy.Integer("x")
        raise AssertionError

    assert in_bounded_time(ours) == (None, "error", "KeyError: 'ours'")
    assert in_bounded_time(algebra) == (0.0, "ok", "no answer found (ValueError)")
