"""Whether the program in a response passes the problem's tests, run in a sandbox."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from posttrain.core.contracts import PluginConfig, Reward, RewardContext
from posttrain.core.sandbox.model import SandboxLimits, SandboxSettings
from posttrain.core.sandbox.runner import Sandbox
from posttrain.core.sandbox.unit_tests import read_tests, run_tests
from posttrain.core.types import RewardSample, Score

_FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_PYTHON = ("python", "python3", "py")


STARTING_S = 10.0
"""Seconds that the sandbox itself may take on a busy machine."""


class CodeTestsConfig(PluginConfig):
    """Settings of `code_tests`."""

    score: Literal["all", "fraction"] = Field(
        default="all", description="all: 1 if every test passes; fraction: passed / total"
    )
    extract: Literal["last_block", "whole"] = Field(
        default="last_block", description="last_block: the last fenced Python block; whole: all"
    )
    metadata_key: str = Field(
        default="tests", description="entry of the problem's metadata with the tests, a JSON list"
    )
    test_timeout_s: float = Field(default=4.0, gt=0, le=86_400, description="seconds for one test")
    timeout_s: float = Field(
        default=12.0,
        gt=0,
        le=86_400,
        description="seconds for all tests of a response",
    )
    limits: SandboxLimits = Field(
        default=SandboxLimits(), description="limits of one run; wall_s is set by the two above"
    )
    sandbox: SandboxSettings = Field(
        default=SandboxSettings(), description="which isolation; see docs/sandbox.md"
    )


class CodeTestsReward(Reward[CodeTestsConfig]):
    """R_i = 1[all tests pass], or passed / total with `score: fraction`.

    Tests are a JSON list in the problem's metadata: Python code that raises when the solution is
    wrong (`"assert add(1, 2) == 3"`), or `{"input": ..., "output": ...}` of a whole program. No
    program, a crash and a timeout are 0, with a detail. If the sandbox fails, or the problem has no
    tests that can be read, the sample is not scored: status `error`.
    Source: `code_unit_tests`, as in APPS, arXiv:2105.09938, section 3.2 (strict and average).
    """

    name = "code_tests"
    Config = CodeTestsConfig

    def __init__(self, config: CodeTestsConfig) -> None:
        super().__init__(config)
        self._sandbox: Sandbox | None = None

    def setup(self, context: RewardContext) -> None:
        """Find the sandbox before the first response is there."""
        self._sandbox = Sandbox.best(self.config.sandbox, self.config.limits)

    def time_limit_s(self) -> float:
        """Longer than its programs may run: a slow program is a 0, not a failure of the reward."""
        return self.config.timeout_s + STARTING_S

    def score(self, samples: Sequence[RewardSample]) -> list[Score]:
        """One score per sample, in order."""
        return [self._score(sample) for sample in samples]

    def _score(self, sample: RewardSample) -> Score:
        key, problem = self.config.metadata_key, sample.problem
        try:
            tests = read_tests(problem.metadata.get(key, ""))
        except ValueError as error:
            return Score(None, "error", f"problem {problem.key[:60]!r}: metadata '{key}' {error}")
        code = sample.text if self.config.extract == "whole" else last_block(sample.text)
        if not code.strip():
            return Score(0.0, detail="no program found")
        if self._sandbox is None:
            self._sandbox = Sandbox.best(self.config.sandbox, self.config.limits)
        whole = self.config.score == "all"
        outcome = run_tests(
            self._sandbox,
            code,
            tests,
            test_s=self.config.test_timeout_s,
            total_s=self.config.timeout_s,
            stop_at_first=whole,
        )
        if outcome.error:
            return Score(None, "error", f"the sandbox failed: {outcome.error}")
        fraction = outcome.passed / outcome.total
        return Score(float(fraction == 1.0) if whole else fraction, detail=outcome.detail)


def last_block(text: str) -> str:
    """The last fenced block marked as Python, else the last without a mark, else nothing."""
    blocks = [(mark.lower(), body) for mark, body in _FENCE.findall(text)]
    marked: list[str] = [body for mark, body in blocks if mark in _PYTHON]
    plain = [body for mark, body in blocks if not mark]
    return (marked or plain or [""])[-1]
