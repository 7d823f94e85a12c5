"""Runs a program's tests inside the sandbox, as its main program. See `unit_tests`.

On stdin: a JSON object with `code`, `tests`, `nonces`, `test_s` and `stop_at_first`. The line
`NONCE pass` or `NONCE fail WHY` goes to stdout for each test that came to its end; `load WHY` if
the code itself did not. The program's own output goes nowhere.
"""

import ast
import json
import os
import signal
import sys
import time
import types
from typing import SupportsFloat

NAME = "<solution>"


def comparable(value: object, depth: int = 0) -> bool:
    """False for a value whose class, made by the solution, decides itself what it equals."""
    equals = type(value).__eq__
    code = getattr(equals, "__code__", None)
    library = os.path.dirname(os.__file__)
    if code is not None and not code.co_filename.startswith(library):
        return False
    if depth < 8 and isinstance(value, (list, tuple, set, frozenset)):
        return all(comparable(item, depth + 1) for item in value)
    if depth < 8 and isinstance(value, dict):
        return all(comparable(k, depth + 1) and comparable(v, depth + 1) for k, v in value.items())
    return True


def equals_literal(value: object, expected: object) -> None:
    """`assert value == expected`, for an `expected` that is written out in the test."""
    if not comparable(value):
        raise AssertionError(f"a {type(value).__name__} has an == of its own")
    if not value == expected:
        raise AssertionError(f"{value!r:.80} is not {expected!r:.80}")


def equals_json(value: object, expected: object, tolerance: float) -> None:
    """That a call gives what JSON can write of its value, or that in a list of one, as in APPS."""
    if not comparable(value):
        raise AssertionError(f"a {type(value).__name__} has an == of its own")
    ways = [expected]
    if isinstance(expected, list) and len(expected) == 1:
        ways += expected
    if not any(close(value, one, tolerance) for one in ways):
        raise AssertionError(f"{value!r:.80} is not {expected!r:.80}")


def close(value: object, expected: object, tolerance: float) -> bool:
    """Equal but for decimals within `tolerance`; JSON has no tuples, and only text as keys."""
    if isinstance(expected, float):
        return isinstance(value, SupportsFloat) and abs(float(value) - expected) <= tolerance * max(
            1.0, abs(expected)
        )
    if isinstance(expected, list):
        return (
            isinstance(value, (list, tuple))
            and len(value) == len(expected)
            and all(close(one, two, tolerance) for one, two in zip(value, expected, strict=True))
        )
    if isinstance(expected, dict) and isinstance(value, dict):
        named = {str(key): one for key, one in value.items()}
        return named.keys() == expected.keys() and all(
            close(named[key], one, tolerance) for key, one in expected.items()
        )
    return bool(value == expected)


class Literals(ast.NodeTransformer):
    """Turns `assert value == literal` into a call of `equals_literal`; a comparison that is a
    statement of its own, which could not fail, is an assertion.
    """

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if not isinstance(node.value, ast.Compare):
            return node
        return self.visit_Assert(ast.copy_location(ast.Assert(node.value, None), node))

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        test = node.test
        if not (
            isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq)
        ):
            return node
        sides = [test.left, test.comparators[0]]
        literal = [is_literal(side) for side in sides]
        if literal[0] == literal[1]:
            return node
        value, expected = sides if literal[1] else sides[::-1]
        call = ast.Call(ast.Name("__equals_literal", ast.Load()), [value, expected], [])
        return ast.copy_location(ast.Expr(call), node)


def is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def why(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def main() -> None:
    """Load the code, then run each test in a process of its own."""
    # Taken now, so that a solution which replaces them breaks nothing by accident.
    fork, wait, write, leave, now = os.fork, os.waitpid, os.write, os._exit, time.monotonic
    kill, sleep, run = os.kill, time.sleep, exec
    job = json.loads(sys.stdin.buffer.read())
    out = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)

    solution = types.ModuleType("solution")
    sys.modules["solution"] = solution
    names = solution.__dict__
    try:
        run(compile(job["code"], NAME, "exec"), names)
    except BaseException as error:  # SystemExit too: what it does is its own affair
        write(out, f"load {why(error)}\n".encode("utf-8", "replace"))
        leave(0)
    for test, nonce in zip(job["tests"], job["nonces"], strict=True):
        child = fork()
        if child == 0:
            verdict = "pass"
            try:
                tree = ast.fix_missing_locations(Literals().visit(ast.parse(test, "<test>")))
                ours = {"__equals_literal": equals_literal, "__equals_json": equals_json}
                run(compile(tree, "<test>", "exec"), {**names, **ours})
            except BaseException as error:  # as above
                verdict = f"fail {why(error)}"
            write(out, f"{nonce} {verdict}\n".encode("utf-8", "replace"))
            leave(0 if verdict == "pass" else 1)
        limit = now() + job["test_s"]
        ended, status = wait(child, os.WNOHANG)
        while not ended and now() < limit:
            sleep(0.001)
            ended, status = wait(child, os.WNOHANG)
        if not ended:
            kill(child, signal.SIGKILL)
            _, status = wait(child, 0)
        if status and job["stop_at_first"]:
            break
    leave(0)


if __name__ == "__main__":
    main()
