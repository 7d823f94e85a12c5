"""Whether the program in a response passes the problem's tests, run in a sandbox."""

from __future__ import annotations

import ast
import itertools
import re
import textwrap
import warnings
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from posttrain.core.contracts import PluginConfig, Reward, RewardContext
from posttrain.core.sandbox.model import SandboxLimits, SandboxSettings
from posttrain.core.sandbox.runner import Sandbox
from posttrain.core.sandbox.unit_tests import UnitTest, read_tests, run_tests
from posttrain.core.types import Problem, RewardSample, Score

_OPEN = re.compile(r"(`{3,}|~{3,})[ \t]*([\w+.#-]*)[^\n`]*\n")
_ONE_LINE = re.compile(r"```[ \t]*(python3?|py)[ \t]+([^\n`]+)```", re.IGNORECASE)
_MAX_CLOSES = 20  # fences in docstrings: each is a candidate for the end, and is parsed
_PYTHON = re.compile(r"i?py(?:thon)?[0-9.]*", re.IGNORECASE)
_SESSION = re.compile(r"\s*(?:>>>|[$%] |In \[)")
_OF_CODE = re.compile(r"[A-Za-z_]\w*\s*[(=\[.:]|^\s*(?:import|from)\b", re.MULTILINE)
_NEXT = re.compile(r"^[ \t]*(?:`{3,}|~{3,})[ \t]*\w", re.MULTILINE)


STARTING_S = 10.0
"""Seconds that the sandbox itself may take on a busy machine."""


class CodeTestsConfig(PluginConfig):
    """Settings of `code_tests`."""

    score: Literal["all", "fraction"] = Field(
        default="all", description="all: 1 if every test passes; fraction: passed / total"
    )
    extract: Literal["last_block", "whole"] = Field(
        default="last_block",
        description="last_block: the last fenced Python block that is the program (not an "
        "example of its use); whole: the whole text",
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

    Tests are JSON in the problem's metadata: a list of Python code that raises when the solution is
    wrong (`"assert add(1, 2) == 3"`) and of `{"input": ..., "output": ...}` of a whole program, or
    the forms of APPS, MBPP and HumanEval (`read_tests`). Printed decimals may differ by 1e-6. No
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

    def unreadable(self, problem: Problem) -> str:
        """Whether the problem's tests have one of the known forms."""
        tests = self._tests(problem)
        return tests if isinstance(tests, str) else ""

    def _tests(self, problem: Problem) -> list[UnitTest] | str:
        """The tests, or why they cannot be read."""
        key, metadata = self.config.metadata_key, problem.metadata
        try:
            return read_tests(metadata.get(key, ""), metadata.get("entry_point", ""))
        except ValueError as error:
            return f"problem {problem.key[:60]!r}: metadata '{key}' {error}"

    def _score(self, sample: RewardSample) -> Score:
        tests = self._tests(sample.problem)
        if isinstance(tests, str):
            return Score(None, "error", tests)
        called = "\n".join(test.code for test in tests)
        text = sample.text.replace("\r\n", "\n")
        code = text if self.config.extract == "whole" else program_in(text, called)
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


def program_in(text: str, tests: str = "") -> str:
    """The program that a response gives, of its blocks marked as Python, else of those without.

    The last block, unless it only uses what an earlier block defines: then the earlier block if it
    is a program of its own, or both together. With tests that call a function it is the last block
    that defines one of the names that they use.
    """
    _, ended, after = text.rpartition("</think>")  # drafts are no answer
    found = (blocks(after) if ended else []) or blocks(text)
    marked = [body for mark, body in found if _PYTHON.fullmatch(mark)]
    bodies = marked or [body for mark, body in found if not mark]
    bodies = [body for body in bodies if body.strip()]
    if not bodies:
        return ""
    bodies = [body for body in bodies if not _is_data(body)] or bodies
    trees = [_tree(body) for body in bodies]
    last = len(bodies) - 1
    if tests and (wanted := _names(_tree(tests))):
        last = next(
            (i for i in range(last, -1, -1) if wanted & _defined(trees[i], deep=False)), last
        )
    missing = _names(trees[last]) - _defined(trees[last])
    earlier = [i for i in range(last) if missing & _defined(trees[i], deep=False)]
    if not earlier:
        return bodies[last]
    if not tests and not _defines(trees[last]) and _runs(trees[earlier[-1]]):
        return bodies[earlier[-1]]
    return "\n".join(bodies[i] for i in [*earlier, last])


def blocks(text: str) -> list[tuple[str, str]]:
    """Mark and content of each fenced block; one that is never closed goes to the end."""
    found: list[tuple[str, str]] = []
    place = 0
    while True:
        opened, single = _OPEN.search(text, place), _ONE_LINE.search(text, place)
        if single and (opened is None or single.start() <= opened.start()):
            found.append((single[1], single[2].strip()))
            place = single.end()
        elif opened:
            body, place = _content(text, opened)
            found.append((opened[2], body))
        else:
            return found


def _content(text: str, opened: re.Match[str]) -> tuple[str, int]:
    """The block's content and where it ends: the first fence before which the content is Python."""
    fence = opened[1]
    close = re.compile(
        rf"^[ \t>]*{fence[0]}{{{len(fence)},}}[ \t]*(?:[^\w\s{{{fence[0]}][^\n`]*)?$", re.MULTILINE
    )
    first: tuple[str, int] | None = None
    for closed in itertools.islice(close.finditer(text, opened.end()), _MAX_CLOSES):
        found = _unindented(text[opened.end() : closed.start()]), closed.end()
        if _tree(found[0]) is not None:
            return found
        first = first or found
    # One that is never closed ends where the next one opens.
    if following := _NEXT.search(text, opened.end(), first[1] if first else len(text)):
        return _unindented(text[opened.end() : following.start()]), following.start()
    if first is None:
        rest = re.sub(rf"{fence[0]}{{3,}}\s*\Z", "", text[opened.end() :])
        return _unindented(rest), len(text)
    return first


def _unindented(block: str) -> str:
    """Without the indent of a list, or the > of a quotation."""
    if all(line.lstrip().startswith(">") for line in block.splitlines() if line.strip()):
        block = re.sub(r"^[ \t]*> ?", "", block, flags=re.MULTILINE)
    return textwrap.dedent(block)


def _is_data(body: str) -> bool:
    """Whether a block is an input, an output, comments or a session, and no program."""
    tree = _tree(body)
    if tree is None:
        return bool(_SESSION.match(body)) or _OF_CODE.search(body) is None
    return all(isinstance(node, ast.Expr) for node in tree.body) and not any(
        isinstance(node, ast.Call) for node in ast.walk(tree)
    )


def _tree(code: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings(action="ignore"):
            return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _names(tree: ast.Module | None) -> set[str]:
    """The names that the code reads."""
    nodes = ast.walk(tree) if tree else ()
    return {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def _defined(tree: ast.Module | None, *, deep: bool = True) -> set[str]:
    """The names that the code defines, with `deep` in any scope, else as functions and classes."""
    if tree is None:
        return set()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    top = {node.name for node in tree.body if isinstance(node, kinds)}
    for node in ast.walk(tree) if deep else tree.body:
        if isinstance(node, ast.Assign) and not deep:
            top |= {one.id for one in node.targets if isinstance(one, ast.Name)}
        elif isinstance(node, kinds):
            top.add(node.name)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            top.add(node.id)
        elif isinstance(node, ast.arg):
            top.add(node.arg)
        elif isinstance(node, ast.alias):
            top.add((node.asname or node.name).partition(".")[0])
    return top


def _defines(tree: ast.Module | None) -> bool:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return tree is not None and any(isinstance(node, kinds) for node in tree.body)


def _runs(tree: ast.Module | None) -> bool:
    """Whether the code does more than define: it has a call or a branch at its top level."""
    kinds = (ast.If, ast.For, ast.While, ast.With, ast.Try)
    return tree is not None and any(
        isinstance(node, kinds) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
        for node in tree.body
    )
