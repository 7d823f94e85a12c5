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
import contextlib
import json
import keyword
import math
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.core.sandbox.model import SandboxResult
from posttrain.core.sandbox.runner import Sandbox

_HARNESS = Path(__file__).with_name("harness.py")
TOLERANCE = 1e-6
"""How far a decimal number may be from the expected one, relative to it where it is above 1."""


@dataclass(frozen=True, slots=True)
class UnitTest:
    """Python code that raises when the solution is wrong, or an input and its right output."""

    code: str = ""
    input: str = ""
    output: str | None = None

    @property
    def is_pair(self) -> bool:
        return self.output is not None


def read_tests(text: str, entry_point: str = "") -> list[UnitTest]:
    """Tests from JSON, or from Python code, in the forms that data sets use.

    A list of code and of `{"input": ..., "output": ...}`; `{"inputs": [...], "outputs": [...]}`,
    with `fn_name` for calls (APPS); `{"test_list": [...]}` (MBPP); `{"test": ..., "entry_point":
    ...}` or the code of `check(candidate)` (HumanEval, `entry_point` names the function). JSON in a
    JSON text, and lists as Python prints them, are read as well. `ValueError` ends the sentence
    "metadata 'tests' ...".
    """
    if not text.strip():
        raise ValueError("is missing: the task must give a JSON list of tests")
    rows: object = text
    for _ in range(2):
        if isinstance(rows, str):
            code = rows
            try:
                rows = json.loads(code)
            except (ValueError, RecursionError) as error:
                if not _is_python(code):
                    raise ValueError(f"is not JSON ({error})") from error
                rows = _literal(code) or [_with_check(code, entry_point)]
    if isinstance(rows, dict):
        rows = _rows_of(rows, entry_point)
    if not isinstance(rows, list) or not rows:
        raise ValueError("is not a list of at least one test")
    return [_read_test(row, number, entry_point) for number, row in enumerate(rows, start=1)]


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _literal(code: str) -> object:
    """A list or mapping as Python prints it, in which as code nothing could fail; else None."""
    try:
        found = ast.literal_eval(code.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return found if isinstance(found, list | dict) else None


def _with_check(code: str, entry_point: str) -> str:
    """HumanEval's tests define `check(candidate)` and leave the call to the caller."""
    if not re.search(r"^def check\(", code, re.MULTILINE):
        return code
    if re.search(r"^check\(", code, re.MULTILINE):
        return code
    if not entry_point.isidentifier():
        raise ValueError("defines check(candidate) without 'entry_point': name the function")
    return f"{code}\n\ncheck({_function(entry_point)})"


def _function(name: str) -> str:
    """The function of this name, or the method of `Solution` that LeetCode's problems ask for."""
    return f"({name} if {name!r} in globals() else Solution().{name})"


_CAN_FAIL = (ast.Assert, ast.Call, ast.Raise, ast.Compare)
_INPUT = ("input", "stdin")
_OUTPUT = ("output", "stdout", "expected_output", "expected")


def _first(table: Mapping[str, object], names: Sequence[str]) -> object:
    return next((table[name] for name in names if name in table), None)


def _rows_of(table: dict[str, object], entry_point: str) -> object:
    """The single tests of a mapping that holds all tests of a problem."""
    inputs, outputs = table.get("inputs"), table.get("outputs")
    if inputs is None and not table.get("fn_name") and "testtype" not in table:
        given, wanted = _first(table, _INPUT), _first(table, _OUTPUT)
        if isinstance(given, list) and isinstance(wanted, list) and len(given) == len(wanted):
            inputs, outputs = given, wanted  # CodeContests
    if isinstance(inputs, list) and isinstance(outputs, list):
        if len(inputs) != len(outputs):
            raise ValueError(
                f"has {len(inputs)} inputs and {len(outputs)} outputs: expected one for each"
            )
        name = table.get("fn_name") or ""
        return [
            {"input": given, "output": wanted, "fn_name": name}
            for given, wanted in zip(inputs, outputs, strict=True)
        ]
    listed = table.get("test_list", table.get("tests"))
    if isinstance(listed, list):
        before = table.get("test_setup_code") or table.get("test_imports") or ""
        if isinstance(before, list):
            before = "\n".join(map(str, before))
        more = table.get("challenge_test_list")
        rows = [*listed, *(more if isinstance(more, list) else [])]
        return [f"{before}\n{row}" if before and isinstance(row, str) else row for row in rows]
    code = table.get("test")
    if isinstance(code, str):
        return [_with_check(code, str(table.get("entry_point") or entry_point))]
    return [table]


def _read_test(row: object, number: int, entry_point: str) -> UnitTest:
    if isinstance(row, str):
        try:
            tree = ast.parse(row)
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"has a test {number} that is not Python: {error}") from error
        if not any(isinstance(node, _CAN_FAIL) for node in ast.walk(tree)):
            raise ValueError(f"has a test {number} that no program can fail: {row!r:.80}")
        return UnitTest(code=_with_check(row, entry_point))
    if isinstance(row, dict):
        given = next((name for name in _INPUT if name in row), None)
        wanted = next((name for name in _OUTPUT if name in row), None)
        if given is not None and wanted is not None and row[wanted] is not None:
            name = row.get("fn_name") or ""
            if not name and row.get("testtype") == "functional":
                name = entry_point
                if not name:
                    raise ValueError(f"has a test {number} of a function without 'entry_point'")
            if name:
                return _call(str(name), row[given], row[wanted], number)
            return UnitTest(input=_stream(row[given]), output=_stream(row[wanted]))
    raise ValueError(
        f"has a test {number} that is neither code nor {{'input': ..., 'output': ...}}: {row!r:.80}"
    )


def _stream(value: object) -> str:
    """A value as a program reads or prints it; a list is one line for each of its values."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        flat = all(not isinstance(one, list | dict) for one in value)
        if flat:
            return "\n".join(_stream(one) for one in value)
        return "\n".join(
            " ".join(map(_stream, one)) if isinstance(one, list) else _stream(one) for one in value
        )
    if isinstance(value, dict):
        return json.dumps(value)
    return "" if value is None else str(value)


def _call(name: str, given: object, wanted: object, number: int) -> UnitTest:
    """A call of the function with the arguments, compared with the value that is wanted."""
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"has the fn_name {name!r:.40}, expected the name of a function")
    if isinstance(given, str):  # one argument a line, as JSON
        try:
            given = [json.loads(line) for line in given.splitlines() if line.strip()]
        except ValueError:
            given = [given]
        if isinstance(wanted, str):
            with contextlib.suppress(ValueError):
                wanted = json.loads(wanted)
    if isinstance(given, dict):
        arguments = ", ".join(f"{key}={value!r}" for key, value in given.items())
    else:
        arguments = ", ".join(map(repr, given if isinstance(given, list) else [given]))
    call = f"{_function(name)}({arguments})"
    return UnitTest(code=f"__equals_json({call}, {wanted!r}, {TOLERANCE!r})")


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
        done = sandbox.run(
            code, stdin=test.input.replace("\r\n", "\n").encode(), wall_s=min(test_s, remaining)
        )
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
    return "" if _same_output(got, expected) else f"printed {got.strip()[:80]!r}"


def _same_output(got: str, expected: str) -> bool:
    """Equal lines without trailing white space; decimal numbers may differ by `TOLERANCE`."""
    left, right = _lines(got), _lines(expected)
    return len(left) == len(right) and all(
        one == other or _same_words(one.split(), other.split())
        for one, other in zip(left, right, strict=True)
    )


def _same_words(got: list[str], expected: list[str]) -> bool:
    return len(got) == len(expected) and all(
        one == other or _close(one, other) for one, other in zip(got, expected, strict=True)
    )


_DECIMAL = re.compile(r"[+-]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][+-]?[0-9]+)?")


def _close(got: str, expected: str) -> bool:
    """Whole numbers are compared as text, so that large ones are exact."""
    if not re.search(r"[.eE]", expected):
        return False
    if not _DECIMAL.fullmatch(got) or not _DECIMAL.fullmatch(expected):
        return False
    left, right = float(got), float(expected)
    return math.isfinite(left) and abs(left - right) <= TOLERANCE * max(1.0, abs(right))


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
