"""Whether a response's final answer is mathematically equal to the reference (math-verify)."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import select
import signal
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

from pydantic import Field

from posttrain.core.contracts import PluginConfig, Reward
from posttrain.core.math.answers import (
    after_marker,
    as_latex,
    bracket_depth,
    has_unfinished_box,
    is_huge,
    large_integer,
    last_boxed,
    multiplied,
    normal,
    number_in_base,
    residue,
    time_of_day,
    without_blanks,
)
from posttrain.core.math.brackets import as_interval, parts
from posttrain.core.math.choices import is_hedged, labelled
from posttrain.core.math.numbers import is_number, same_number
from posttrain.core.types import Problem, RewardSample, Score, ScoreStatus

MAX_DEPTH = 50  # its parser takes seconds where hundreds of brackets nest
CPU_S = 0.4  # processor time for one answer; ordinary ones need 0.01 to 0.03 s, hard ones 0.2 s
WALL_S = 0.8  # by the clock, on a machine so busy that it grants less than half a processor
_NO_VARIABLES = re.compile(r"\\(?:text|mathrm|mathbf|mbox)\s*\{[^{}]*\}|\\[A-Za-z]+")
_VARIABLES = re.compile(_NO_VARIABLES.pattern + "|[A-Z]")
_TAGS = re.compile(r"</?[A-Za-z][A-Za-z_]*>")  # <answer>5</answer>
LIBRARIES = ("math_verify", "latex2sympy2_extended", "sympy", "mpmath", "antlr4")
KINDS = (  # of answers that are equal but written otherwise
    (r"\frac{1}{2}", "0.5"),
    (r"(x+1)^2-\frac{1}{y}", r"x^2+2x+1-\frac{1}{y}"),
    (r"\sin^2 x+\cos^2 x", "1"),
    (r"\sqrt{3+2\sqrt{2}}", r"1+\sqrt{2}"),
    (r"\ln 4", r"2\ln 2"),
    (r"e^{i\pi}", "-1"),
    (r"\int_0^1 x dx", r"\frac{1}{2}"),
    (r"y=2x+1", "2x-y+1=0"),
    (r"\{1, \sqrt{2}\}", r"\{\sqrt{2}, 1\}"),
    (r"(-\infty,1)\cup(2,3]", r"(-\infty,1)\cup(2,3]"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\\frac{4}{2}\end{pmatrix}"),
)
Graded = tuple[float | None, ScoreStatus, str]

# It warns, once a process, that its time limits are off; see `MathAccuracyReward`.
logging.getLogger("math_verify.parser").setLevel(logging.ERROR)
logging.getLogger("math_verify.grader").setLevel(logging.ERROR)


class MathAccuracyConfig(PluginConfig):
    """Settings of `math_accuracy`."""

    read: Literal["auto", "marker", "boxed", "last"] = Field(
        default="auto",
        description="where the response gives its answer: after the last `marker`; in the last "
        "\\boxed{}; the last expression; auto: the first of these three that is there",
    )
    marker: str = Field(
        default="####", min_length=1, description="the text before the answer, as in GSM8K"
    )
    max_chars: int = Field(
        default=2000, ge=16, description="characters at the end of the response that are read"
    )
    precision: int = Field(
        default=6, ge=0, le=100, description="decimals to which decimal numbers must agree"
    )


class MathAccuracyReward(Reward[MathAccuracyConfig]):
    """R_i = 1[answer of the response = problem.answer as mathematics], else 0.

    1/2, 0.5 and \\frac{1}{2} are equal, so are 50% and 50 or 0.5, sets in any order, and numbers
    with and without thousands separators, currency or unit (units are dropped, not compared).
    Numbers below 0.001 must agree in three digits as well. A response without an answer, or with
    one that cannot be read, is 0 and its `detail` says so. A reference that cannot be read is the
    data's fault: unscored, status `error`.

    Points, intervals and sets are compared part for part, with their brackets. math-verify's own
    time limits are off: they are signals, which raise outside a main thread and cannot interrupt a
    power of huge integers. Each comparison runs in a process that ends after `CPU_S` seconds of
    processor time or `WALL_S` by the clock; an answer that needs more is 0, and its `detail` says
    which of the two it was. Power towers are not computed.
    Source: math-verify 0.9, `parse` and `verify`; DeepSeek-R1, arXiv:2501.12948, section 2.2.2.
    """

    name = "math_accuracy"
    Config = MathAccuracyConfig
    needs_answer = True

    @classmethod
    def preload(cls) -> None:
        """math-verify and SymPy, which take a second or more."""
        _warm()

    def score(self, samples: Sequence[RewardSample]) -> list[Score]:
        """1.0 or 0.0 per sample, in order; None where the reference cannot be read."""
        return [self._score(sample) for sample in samples]

    def unreadable(self, problem: Problem) -> str:
        """Whether math-verify reads the reference; most are read without it."""
        reference = problem.answer
        gold = normal(reference)
        if is_number(gold) or large_integer(gold) is not None or number_in_base(gold) is not None:
            return ""
        if _wanted(gold) is not None:
            return ""
        if not reference.strip():
            return _unreadable(reference)
        _warm()
        _, status, detail = in_bounded_time(lambda: self._compare(reference, "0", ""))
        return detail if status == "error" else ""

    def _score(self, sample: RewardSample) -> Score:
        reference = sample.problem.answer
        if not reference.strip():
            return Score(None, "error", _unreadable(reference))
        text = sample.text[-self.config.max_chars :]
        found = self._found(text)
        gold = normal(reference)
        if found is None and _CAPITAL.fullmatch(gold) and not self._needs_place(text):
            found = _chosen_in(text)
        if found is not None and (answer := normal(found)):
            if _same_text(gold, answer):
                return Score(1.0)
            if is_number(gold) and is_number(answer) and same_number(gold, answer):
                return Score(1.0)
            if (chosen := _same_choice(gold, answer)) is not None:
                return Score(float(chosen), detail="" if chosen else f"read {found[:80]}")
            choice = _wanted(gold)
            if choice is not None and choice[1]:
                reference = choice[1]
            if (same := _same_value(gold, answer)) is not None:
                return Score(float(same), detail="" if same else f"read {found}")
            reference, found = _without_modulus(reference), _without_modulus(found)
        _warm()
        value, status, detail = in_bounded_time(lambda: self._compare(reference, found, text))
        return Score(value, status, detail)

    def _compare(self, reference: str, found: str | None, text: str) -> Graded:
        """Value, status and detail; `found` is the answer, None where `text` has no place for it"""
        from math_verify import verify

        def equal(gold: list[Any], answer: list[Any]) -> bool:
            precision = self.config.precision
            same = verify(gold, answer, float_rounding=precision, timeout_seconds=None)
            return bool(same) and not _differ_though_small(gold[0], answer[0], precision)

        reference, found = _with_capitals_apart(reference, found)

        golds = _read(reference)
        if not golds:
            if is_huge(reference):
                return 0.0, "ok", "the reference is too large to compute"
            return None, "error", _unreadable(reference)
        if found is None:
            text = _TAGS.sub(" ", text)
            answer = [] if self._needs_place(text) else _parsed(text, anything=True)
            answers = [answer] if answer else []
        else:
            if not same_brackets(reference, found):
                return 0.0, "ok", f"read {found[:80]}"
            if (by_parts := self._by_parts(reference, found, equal)) is not None:
                return float(by_parts), "ok", "" if by_parts else f"read {found[:80]}"
            answers = _read(found)
        if not answers:
            return 0.0, "ok", "no answer found"
        right = any(equal(gold, answer) for gold in golds for answer in answers)
        return float(right), "ok", "" if right else f"read {str(answers[0][0])[:80]}"

    def _by_parts(
        self, reference: str, found: str, equal: Callable[[list[Any], list[Any]], bool]
    ) -> bool | None:
        """Whether points, intervals and sets agree part for part; None for other answers."""
        gold, answer = (as_interval(normal(one)) for one in (reference, found))
        left, right = parts(gold), parts(answer)
        if not (left[0] and right[0] and len(left[2]) > 1 and len(right[2]) > 1):
            return None
        if left[:2] != right[:2] or (left[0] != "{" and len(left[2]) != len(right[2])):
            return False
        golds = [_parsed_answer(as_latex(one)) for one in left[2]]
        answers = [_parsed_answer(as_latex(one)) for one in right[2]]
        if not all(golds) or not all(answers):
            return None
        if left[0] != "{":
            return all(equal(one, other) for one, other in zip(golds, answers, strict=True))
        return all(any(equal(one, other) for other in answers) for one in golds) and all(
            any(equal(one, other) for one in golds) for other in answers
        )

    def _needs_place(self, text: str) -> bool:
        """Whether an answer without marker and box does not count."""
        return self.config.read in ("marker", "boxed") or (
            self.config.read == "auto" and has_unfinished_box(text)
        )

    def _found(self, text: str) -> str | None:
        """What the text gives after the marker or in the last box; None if it has neither."""
        read = self.config.read
        if read in ("auto", "marker"):
            found = after_marker(text, self.config.marker)
            if found is not None or read == "marker":
                return found
        return last_boxed(text) if read in ("auto", "boxed") else None


def _unreadable(reference: str) -> str:
    return f"reference answer cannot be read: {reference[:80]!r}"


def _same_text(left: str, right: str) -> bool:
    return bracket_depth(left) <= MAX_DEPTH and without_blanks(left) == without_blanks(right)


def _same_value(gold: str, answer: str) -> bool | None:
    """Whether both state the same number in a base, integer, time or residue; None for others."""
    for read in (number_in_base, large_integer, time_of_day):
        left, right = read(gold), read(answer)
        if left is not None and right is not None:
            return left == right
    wanted, found = residue(gold), residue(answer)
    if wanted is None or found is None:
        return None
    return wanted[1] == found[1] and (wanted[0] - found[0]) % wanted[1] == 0


_CAPITAL = re.compile(r"[(\[]?[A-Z][)\].:]?")
_WITH_TEXT = re.compile(r"(?:\\[a-z]+\s*\{\s*)?(?:\([A-J]\)|[A-J][).:])(?:\}|[\s~]|\\[ ,;])")


def _wanted(gold: str) -> tuple[str, str] | None:
    """The letter of a reference that is a choice, and its text."""
    return labelled(gold) if _CAPITAL.fullmatch(gold) or _WITH_TEXT.match(gold) else None


# "The answer is (B)", but not "the answer is A cat" and "the answer is B or C".
_CHOSEN = re.compile(
    r"(?i:answer(?:\s+is)?)[\s:*$({\[]+(?:\\[a-z]+\{\(?)?"
    r"([A-J])(?![A-Za-z0-9'_^]|\s*[=+])(?!\W{0,3}\s*(?:or|and|,|/)\W{0,3}[A-J](?![A-Za-z]))(?<![AI](?=\s[a-z]))"
)


def _chosen_in(text: str) -> str | None:
    """The choice that a response names last, or is, without a box around it."""
    if _CAPITAL.fullmatch(whole := normal(text)):
        return whole
    chosen = _CHOSEN.findall(text)
    return chosen[-1] if chosen else None


def _same_choice(gold: str, answer: str) -> bool | None:
    """Whether both choose the same letter; None where they are compared as answers.

    The reference is a capital, perhaps with the text of that choice, which then answers as well.
    """
    wanted, found = _wanted(gold), labelled(answer)
    if wanted is None:
        return None
    if found is None:
        return False if is_hedged(answer) else None
    if found[0] == wanted[0]:
        return True
    return False if _wanted(answer) else None


def _with_capitals_apart(reference: str, found: str | None) -> tuple[str, str | None]:
    """Both with other letters for those that an answer has in both cases: math-verify reads R as r,
    so that R - r would be 0.
    """
    texts = [reference] if found is None else [reference, found]
    plain = [_NO_VARIABLES.sub(" ", text) for text in texts]
    if any(re.search("[a-z]{3}", text) for text in plain):  # words, which are compared as such
        return reference, found
    both = {c for text in plain for c in text if "A" <= c <= "Z" and c.lower() in text}
    free = [c for c in "xyzabcjknpqrtuvw" if all(c not in text.lower() for text in plain)]
    other = dict(zip(sorted(both), free, strict=False))

    def renamed(text: str) -> str:
        return _VARIABLES.sub(lambda m: other.get(m.group(), m.group()), text)

    return renamed(reference), None if found is None else renamed(found)


def _without_modulus(answer: str) -> str:
    found = residue(normal(answer))
    return answer if found is None else str(found[0])


_PERCENT = re.compile(
    r"([+-]?)(?:([1-9][0-9]*\.[0-9]+)|([1-9][0-9]*)\s*(\\[cdt]?frac\{.+\}))\s*\\?%"
)
_FRACTION_PERCENT = re.compile(r"([+-]?\s*\\[cdt]?frac.+?)\s*\\?%")
_SIGNED_PLUS = re.compile(r"(\A|[{(=])\s*\+")


def _readings(answer: str) -> list[str]:
    """The answer as LaTeX, and other ways to read it.

    "1,100" is a number, and is a list as well; "2 million" is 2, of which the unit is dropped, and
    2000000; "12.5%" is 0.125, and 12.5 where per cent were asked for.
    """
    plain = normal(answer)
    if number := multiplied(plain):
        return [as_latex(answer), as_latex(number)]
    if percent := _PERCENT.fullmatch(plain):
        value = percent[1] + (percent[2] or f"({percent[3]} + {percent[4]})")
        return [as_latex(answer), value, rf"\frac{{{value}}}{{100}}"]
    first = as_latex(answer)
    if fraction := _FRACTION_PERCENT.fullmatch(plain):
        return [first, rf"\frac{{{fraction[1]}}}{{100}}"]
    if plain.count(r"\pm") == 1 and r"\mp" not in plain and "," not in plain:
        right = plain.rpartition("=")[2]
        plus = _SIGNED_PLUS.sub(r"\1", right.replace(r"\pm", "+"))
        return [first, plus + ", " + right.replace(r"\pm", "-")]
    if (union := as_interval(plain)) != plain and r"\cup" in union:
        return [first, union]
    # 1,000 is not a list: nobody writes 000 for a part.
    listed = re.sub(r"(?<=[0-9]),(?=0(?![0-9])|[1-9])", ", ", plain)
    two = listed != plain and "," in listed and plain[:1] not in ("(", "[", "\\")
    return [first, listed] if two else [first]


def _read(answer: str) -> list[list[Any]]:  # Any: SymPy's expressions
    """What the parser reads of an answer, or else of what it states after its last "=":
    "P(A|B) = 1/2".
    """
    found = [one for one in map(_parsed_answer, _readings(answer)) if one]
    before, equals, after = answer.rpartition("=")
    if found or not equals or before.rstrip()[-1:] in ("<", ">", "!", "\\"):
        return found
    return [one for one in map(_parsed_answer, _readings(after)) if one]


def same_brackets(reference: str, found: str) -> bool:
    """False where both are lists in brackets of different kinds: (1,2), [1,2] and {1,2} differ."""
    left, right = (parts(as_interval(normal(one))) for one in (reference, found))
    listed = len(left[2]) > 1 and len(right[2]) > 1
    return not listed or not left[0] or not right[0] or left[:2] == right[:2]


def _parsed_answer(latex: str) -> list[Any]:  # Any: SymPy's expressions
    return _parsed(f"${latex}$") if latex else []


@functools.cache
def _warm() -> None:
    """Load the modules and fill the caches of parser and algebra once, not in every process that
    compares: there a comparison of equal expressions would take two to five times as long.
    """
    from math_verify import verify

    for gold, answer in KINDS:
        verify(_parsed(f"${gold}$"), _parsed(f"${answer}$"), timeout_seconds=None)
    _parsed("so 3 = 1/2", anything=True)


def in_bounded_time(work: Callable[[], Graded]) -> Graded:
    """The result of `work` in a process that is ended after `CPU_S` of processor time or `WALL_S`.

    Algebra on a short answer may not end, and cannot be interrupted in C: such an answer is wrong.
    Processor time decides wherever the machine grants half a processor, so that the same answer
    has the same value; the clock alone bounds what a busy machine makes of it.
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork next to threads
        child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_PROF, CPU_S)
            try:
                result = work()
            except Exception as error:
                kind = type(error).__name__
                result = None, "error", f"{kind}: {error}"[:500]  # a fault of this file
                if isinstance(error, MemoryError | RecursionError) or _of_a_library(error):
                    result = 0.0, "ok", f"no answer found ({kind})"
            os.write(writer, json.dumps(result).encode("ascii")[:4000])
        finally:
            os._exit(0)
    os.close(writer)
    try:
        answered = select.poll()  # `select.select` takes no file above number 1023
        answered.register(reader, select.POLLIN)
        ready = answered.poll(1000 * WALL_S)
        reply = os.read(reader, 4096) if ready else b""
    finally:
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        _, _, used = os.wait4(child, 0)
    if reply:
        value, status, detail = json.loads(reply)
        return value, status, detail
    if ready:
        return 0.0, "ok", "no answer found: the algebra did not end"
    granted = used.ru_utime + used.ru_stime
    return 0.0, "ok", f"no answer found: busy machine, {granted:.1f} s of it in {WALL_S} s"


def _of_a_library(error: Exception) -> bool:
    """Whether the algebra raised it, which then cannot read or compare the answer."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(str(f.f_globals.get("__name__")).split(".")[0] in LIBRARIES for f in frames)


def _parsed(text: str, *, anything: bool = False) -> list[Any]:  # Any: SymPy's expressions
    """math-verify's reading of LaTeX, or of anything that may be one; empty if there is none."""
    from math_verify import parse
    from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

    if bracket_depth(text) > MAX_DEPTH or is_huge(text):
        return []
    targets: list[object] = [LatexExtractionConfig()]
    if anything:
        targets = [LatexExtractionConfig(boxed_match_priority=-1), ExprExtractionConfig()]
    found: list[Any] = parse(text, targets, fallback_mode="no_fallback", parsing_timeout=None)
    read = [_with_imaginary_unit(one) for one in found]
    # Two equations that do not hold would be equal, whatever they say.
    return [] if any(str(one) == "False" for one in read) else read


def _with_imaginary_unit(found: Any) -> Any:  # Any: SymPy's expressions, or text
    """What was read with the number `i` for the letter, which math-verify takes for an unknown."""
    import sympy

    if not isinstance(found, sympy.Basic | sympy.MatrixBase):
        return found
    letters = [symbol for symbol in found.free_symbols if symbol.name == "i"]
    if not letters:
        return found
    unit = dict.fromkeys(letters, sympy.I)
    if isinstance(found, sympy.Equality) and found.lhs.is_Symbol and found.lhs not in letters:
        return found.rhs.subs(unit)  # z = 2 + i: of a real z, which it is taken for, it is false
    try:
        return found.subs(unit)
    except TypeError:  # an inequality: there it is a letter
        return found


def _differ_though_small(gold: Any, answer: Any, precision: int) -> bool:  # Any: as above
    """Whether two numbers differ in their first three digits. math-verify rounds to decimals, and
    takes differences below 1e-15 for none: 1e-20 would be 1e-21.
    """
    import sympy

    if not all(isinstance(one, sympy.Expr) and one.is_number for one in (gold, answer)):
        return False
    try:
        left, right = (complex(one.evalf(15)) for one in (gold, answer))
    except (TypeError, ValueError, OverflowError):
        return False
    largest = max(abs(left), abs(right))
    return largest < min(1e-3, 10.0 ** (3 - precision)) and abs(left - right) > 1e-3 * largest
