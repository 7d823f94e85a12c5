"""Whether a response's final answer is mathematically equal to the reference (math-verify)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from posttrain.core.contracts import PluginConfig, Reward
from posttrain.core.math.answers import after_marker, as_latex, bracket_depth, is_huge, last_boxed
from posttrain.core.types import RewardSample, Score

MAX_DEPTH = 50  # its parser takes seconds where hundreds of brackets nest

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
    with and without thousands separators, currency or unit (units are dropped, not compared). A
    response without an answer, or with one that cannot be read, is 0 and its `detail` says so. A
    reference that cannot be read is the data's fault: unscored, status `error`.

    math-verify's own time limits are off. They are signals, which raise outside a main thread, they
    cannot interrupt a power of huge integers, and what they cut off would be a silent zero. So it
    works in any thread, and the time limit is the reward pool's, which kills the process. Power
    towers, exponents of five digits and factorials of four are not computed: no answer, so 0.
    Source: math-verify 0.9, `parse` and `verify`; DeepSeek-R1, arXiv:2501.12948, section 2.2.2.
    """

    name = "math_accuracy"
    Config = MathAccuracyConfig

    @classmethod
    def preload(cls) -> None:
        """math-verify and SymPy, which take a second or more."""
        import math_verify  # noqa: F401

    def score(self, samples: Sequence[RewardSample]) -> list[Score]:
        """1.0 or 0.0 per sample, in order; None where the reference cannot be read."""
        return [self._score(sample) for sample in samples]

    def _score(self, sample: RewardSample) -> Score:
        from math_verify import verify

        reference = sample.problem.answer
        gold = _parsed(f"${as_latex(reference)}$")
        if not gold:
            return Score(None, "error", f"reference answer cannot be read: {reference[:80]!r}")
        answer = self._answer(sample.text[-self.config.max_chars :])
        if not answer:
            return Score(0.0, detail="no answer found")
        equal = verify(gold, answer, float_rounding=self.config.precision, timeout_seconds=None)
        return Score(float(equal), detail="" if equal else f"read {str(answer[0])[:80]}")

    def _answer(self, text: str) -> list[Any]:  # Any: SymPy's expressions
        """What the text gives as its answer; empty if nothing can be read."""
        read = self.config.read
        if read in ("auto", "marker"):
            found = after_marker(text, self.config.marker)
            if found is not None or read == "marker":
                return [] if found is None else _parsed(f"${as_latex(found)}$")
        if read in ("auto", "boxed"):
            found = last_boxed(text)
            if found is not None or read == "boxed":
                return [] if found is None else _parsed(f"${as_latex(found)}$")
        return _parsed(text, anything=True)


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
    return found
