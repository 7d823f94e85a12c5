"""Programs against their tests: assertions that run next to the code, or input and output pairs.

What the verdict rests on. Of a pair, the expected output never enters the sandbox: only the right
output passes. Assertions run in one interpreter with the code; a test counts as passed only when
its nonce, drawn for this run, comes back after its last line. Printing, `sys.exit`, `os._exit`, a
crash or a hang therefore fail it, and so does an object with an == of its own against a value that
the test writes out. Code that looks for the nonce in the interpreter's frames, or replaces what the
test calls, can still forge it: nothing in one interpreter is hidden from code in it.
"""

from __future__ import annotations

import ast
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.core.sandbox.model import SandboxResult
from posttrain.core.sandbox.runner import Sandbox

_HARNESS = Path(__file__).with_name("harness.py")


@dataclass(frozen=True, slots=True)
class UnitTest:
    """Python code that raises when the solution is wrong, or an input and its right output."""

    code: str = ""
    input: str = ""
    output: str | None = None

    @property
    def is_pair(self) -> bool:
        return self.output is not None


def read_tests(text: str) -> list[UnitTest]:
    """Tests from a JSON list of code and of `{"input": ..., "output": ...}`.

    `ValueError` ends the sentence "metadata 'tests' ...".
    """
    if not text:
        raise ValueError("is missing: the task must give a JSON list of tests")
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON ({error})") from error
    if not isinstance(rows, list) or not rows:
        raise ValueError("is not a list of at least one test")
    return [_read_test(row, number) for number, row in enumerate(rows, start=1)]


def _read_test(row: object, number: int) -> UnitTest:
    if isinstance(row, str):
        try:
            ast.parse(row)
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"has a test {number} that is not Python: {error}") from error
        return UnitTest(code=row)
    if isinstance(row, dict) and set(row) == {"input", "output"}:
        if all(isinstance(value, str) for value in row.values()):
            return UnitTest(input=row["input"], output=row["output"])
    raise ValueError(
        f"has a test {number} that is neither code nor {{'input': text, 'output': text}}: "
        f"{row!r:.80}"
    )


@dataclass(frozen=True, slots=True)
class Outcome:
    """How many of the tests passed. `detail` tells of the first that did not."""

    passed: int
    total: int
    detail: str = ""
    error: str = ""


def run_tests(
    sandbox: Sandbox,
    code: str,
    tests: Sequence[UnitTest],
    *,
    test_s: float,
    total_s: float,
    stop_at_first: bool,
) -> Outcome:
    """Run `tests`, each for at most `test_s` seconds, all for at most `total_s`."""
    limit = time.monotonic() + total_s
    total, passed, detail = len(tests), 0, ""
    plain = {number: test.code for number, test in enumerate(tests, 1) if not test.is_pair}
    if plain:
        found = _assertions(sandbox, code, plain, test_s, limit, stop_at_first)
        if found.error:
            return found
        passed, detail = found.passed, found.detail
        if stop_at_first and detail:
            return Outcome(passed, total, detail)
    for number, test in enumerate(tests, 1):
        if not test.is_pair:
            continue
        remaining = limit - time.monotonic()
        if remaining <= 0:
            detail = detail or f"test {number}: no time left of {total_s:g} s"
            break
        done = sandbox.run(code, stdin=test.input.encode(), wall_s=min(test_s, remaining))
        if done.status == "error":
            return Outcome(passed, total, error=done.reason)
        wrong = _wrong(done, test)
        passed += not wrong
        detail = detail or (f"test {number}: {wrong}" if wrong else "")
        if wrong and stop_at_first:
            break
    return Outcome(passed, total, detail)


def _wrong(done: SandboxResult, test: UnitTest) -> str:
    if done.status != "ok":
        return describe(done)
    got, expected = done.stdout.decode("utf-8", "replace"), test.output or ""
    return "" if _lines(got) == _lines(expected) else f"printed {got.strip()[:80]!r}"


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def describe(done: SandboxResult) -> str:
    last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
    if done.status == "nonzero":
        return f"exit code {done.exit_code}: {' '.join(last)[:200]}"
    return f"{done.status}: {done.reason}"


def _assertions(
    sandbox: Sandbox,
    code: str,
    tests: Mapping[int, str],
    test_s: float,
    limit: float,
    stop_at_first: bool,
) -> Outcome:
    nonces = [secrets.token_hex(16) for _ in tests]
    numbers = list(tests)
    job = {
        "code": code,
        "tests": list(tests.values()),
        "nonces": nonces,
        "test_s": test_s,
        "stop_at_first": stop_at_first,
    }
    wall = max(0.1, limit - time.monotonic())
    done = sandbox.run(_HARNESS.read_text("utf-8"), stdin=json.dumps(job).encode(), wall_s=wall)
    if done.status == "error":
        return Outcome(0, len(tests), error=done.reason)
    said: dict[str, str] = {}
    for line in done.stdout.decode("utf-8", "replace").splitlines():
        nonce, _, verdict = line.partition(" ")
        said.setdefault(nonce, verdict)  # a failed test cannot be made good by a later line
    if said.get("load") is not None:
        return Outcome(0, len(tests), f"the code does not load: {said['load']}")
    verdicts = [said.get(nonce, "") for nonce in nonces]
    passed = sum(verdict == "pass" for verdict in verdicts)
    if passed == len(tests):
        return Outcome(passed, len(tests))
    first = next(i for i, verdict in enumerate(verdicts) if verdict != "pass")
    if verdicts[first]:
        text = verdicts[first].removeprefix("fail ")
    else:
        text = "did not come to its end" if done.status == "ok" else describe(done)
    return Outcome(passed, len(tests), f"test {numbers[first]}: {text}")
