"""The reward `code_tests`: what passes, what cannot be forged, and what is not scored."""

from __future__ import annotations

import json
import multiprocessing
import os
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest
import torch
from pydantic import ValidationError

from posttrain.core.contracts import Reward, RewardContext
from posttrain.core.errors import ResourceError
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.rewards.pool import RewardPool
from posttrain.core.sandbox import runner, unit_tests
from posttrain.core.sandbox.model import LEVELS, SandboxResult
from posttrain.core.sandbox.runner import Probe, Sandbox, levels_available
from posttrain.core.types import Problem, RewardSample, Score, Verdict

ADD = ["assert add(1, 2) == 3", "assert add(2, 2) == 4", "x = add(0, 0)\nassert x == 0"]
PAIRS = [{"input": "1\n", "output": "2\n"}, {"input": "5", "output": "6"}]
NAMESPACES_OR_BETTER = pytest.mark.skipif(
    not set(levels_available()) & {"namespaces", "bubblewrap"},
    reason="no sandbox that hides files works here",
)


def reward(**fields: object) -> Reward[Any]:
    return PluginManager().build(Reward, "code_tests", fields)


def sample(text: str, tests: object) -> RewardSample:
    given = tests if isinstance(tests, str) else json.dumps(tests)
    problem = Problem("k", "p", "", "", {"tests": given} if given else {})
    return RewardSample(problem, (), (), text, False, Verdict(0.0, None))


def block(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```\nDone."


def score(code: str, tests: object, **fields: object) -> Score:
    found: list[Score] = reward(**fields).score([sample(block(code), tests)])
    return found[0]


pytestmark = NAMESPACES_OR_BETTER


def test_a_right_program_scores_one_and_a_wrong_one_zero() -> None:
    assert score("def add(a, b): return a + b", ADD) == Score(1.0)
    wrong = score("def add(a, b): return 3", ADD)
    assert wrong.value == 0.0 and wrong.detail == "test 2: AssertionError: 3 is not 4"
    part = score("def add(a, b): return 3 if b else 0", ADD, score="fraction")
    assert part.value == pytest.approx(2 / 3) and part.status == "ok"


def test_programs_are_run_on_inputs() -> None:
    assert score("print(int(input()) + 1)", PAIRS).value == 1.0
    assert score("print(2)", PAIRS, score="fraction").value == 0.5
    wrong = score("print(2)", PAIRS)
    assert wrong.value == 0.0 and wrong.detail == "test 2: printed '2'"
    assert "exit code 1: ZeroDivisionError" in score("print(2)\n1/0", PAIRS).detail
    both = score("def add(a, b): return a + b\nif __name__ == '__main__': print(2)", ADD + PAIRS)
    assert both.value == 0.0 and both.detail == "test 5: printed '2'"


def test_calls_are_compared_as_json_with_room_for_decimals() -> None:
    tests = {"inputs": [[1]], "outputs": [[0.3333333333, [1, 2]]], "fn_name": "f"}
    assert score("def f(a): return [a / 3, (a, 2)]", tests).value == 1.0
    assert score("def f(a): return [a / 4, (a, 2)]", tests).value == 0.0


@pytest.mark.parametrize(
    "code",
    [
        "import sys\nprint('pass')\nsys.exit(0)",
        "import os\nos._exit(0)",
        "import os\ndef add(a, b): os._exit(0)",
        "import sys\ndef add(a, b):\n    print('pass')\n    sys.exit(0)",
        "def add(a, b): raise KeyboardInterrupt",
        "class Any:\n    def __eq__(self, other): return True\ndef add(a, b): return Any()",
        "class Any(int):\n    def __eq__(self, other): return True\ndef add(a, b): return Any()",
        "import os\nfor n in range(3, 30):\n"
        "    try: os.write(n, b'0' * 32 + b' pass\\n')\n    except OSError: pass\n"
        "def add(a, b): os._exit(0)",
        "import atexit, os\natexit.register(lambda: os._exit(0))\ndef add(a, b): raise SystemExit",
        "import os, signal\ndef add(a, b): os.kill(os.getppid(), 9)",
        "while True: pass",
    ],
)
def test_assertions_cannot_be_passed_by_leaving_or_by_equalling_everything(code: str) -> None:
    found = score(code, ADD, timeout_s=2.0, score="fraction")
    assert (found.value, found.status) == (0.0, "ok") and found.detail


def test_a_comparison_without_assert_is_a_test() -> None:
    tests = ["add(1, 2) == 3"]
    assert score("def add(a, b): return a + b", tests).value == 1.0
    assert score("def add(a, b): return a - b", tests).value == 0.0


def test_a_value_within_a_list_may_not_equal_everything_either() -> None:
    code = "class Any:\n    def __eq__(self, other): return True\ndef f(): return [1, Any()]"
    assert score(code, ["assert f() == [1, 2]"]).value == 0.0
    # Classes of the library with an == in Python are taken at their word.
    code = "from collections import Counter\ndef f(): return Counter('aab')"
    assert score(code, ["assert f() == {'a': 2, 'b': 1}", "assert {'a': 2} != f()"]).value == 1.0


def test_each_test_has_its_time_and_all_have_theirs() -> None:
    code = "import time\ndef f(x): time.sleep(x)"
    slow = score(code, ["f(60)", "f(0)"], score="fraction", test_timeout_s=1.0)
    assert (slow.value, slow.status) == (0.5, "ok")
    code = "import time\ntime.sleep(float(input()))"
    pairs = [{"input": "60", "output": ""}, {"input": "0", "output": ""}]
    slow = score(code, pairs, score="fraction", test_timeout_s=1.0)
    assert slow.value == 0.5 and slow.detail.startswith("test 1: timeout")


def test_the_last_python_block_is_taken() -> None:
    text = "```python\ndef add(a, b): return 0\n```\n```py\ndef add(a, b): return a + b\n```\n"
    more = text + "```\nnot python\n```\n```text\noutput\n```"
    assert reward().score([sample(text, ADD), sample(more, ADD)]) == [Score(1.0), Score(1.0)]
    whole = reward(extract="whole").score([sample("def add(a, b): return a + b", ADD)])
    assert whole == [Score(1.0)]


@pytest.mark.parametrize("text", ["", "no code", "```\n```"])
def test_no_program_is_a_zero_that_says_so(text: str) -> None:
    assert reward().score([sample(text, ADD)]) == [Score(0.0, detail="no program found")]


@pytest.mark.parametrize(
    ("tests", "says"),
    [
        ("", "is missing"),
        ("{", "is not JSON"),
        ("[]", "at least one"),
        ([1], "has a test 1 that is neither"),
        ([{"input": "1"}], "has a test 1 that is neither"),
        (["assert f() == 1", "assert ("], "has a test 2 that is not Python"),
    ],
)
def test_a_problem_without_usable_tests_is_not_scored(tests: object, says: str) -> None:
    found = score("x = 1", tests)
    assert found.value is None and found.status == "error" and says in found.detail


def test_a_sandbox_that_fails_gives_no_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Sandbox, *arguments: object, **named: object) -> SandboxResult:
        return runner._error(self.level, "the guard ended with -9: ")

    monkeypatch.setattr(unit_tests.Sandbox, "run", broken)  # type: ignore[attr-defined]
    for tests in (ADD, PAIRS):
        found = score("def add(a, b): return a + b", tests)
        assert found.value is None and found.status == "error"
        assert "the guard ended with -9" in found.detail


def test_a_machine_without_a_sandbox_is_told_before_the_first_response(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "probe", lambda _: [Probe(x, None, "gone") for x in LEVELS])
    context = RewardContext({}, torch.float32, torch.device("cpu"), "eager", 1)
    with pytest.raises(ResourceError, match="apt-get install bubblewrap"):
        reward().setup(context)


def test_a_weak_level_in_the_config_needs_the_users_word() -> None:
    from posttrain.plugins.rewards.code_tests import CodeTestsConfig

    with pytest.raises(ValidationError, match="allow_weak: true"):
        CodeTestsConfig.model_validate({"sandbox": {"min_level": "rlimits"}})


def _in_worker(end: Connection) -> None:
    end.send(reward().score([sample(block("def add(a, b): return a + b"), ADD)]))


def test_it_scores_in_a_forked_worker_process() -> None:
    here, there = multiprocessing.get_context("fork").Pipe()
    worker = multiprocessing.get_context("fork").Process(target=_in_worker, args=(there,))
    worker.start()
    assert here.poll(60)
    assert here.recv() == [Score(1.0)]
    worker.join(10)
    assert worker.exitcode == 0 and worker.pid != os.getpid()


def test_in_a_pool_a_program_that_never_ends_is_a_zero_and_leaves_no_process() -> None:
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    samples = [
        sample(block("def add(a, b): return a + b"), ADD),
        sample(block("while True: pass"), ADD),
        sample(block("import os\nos._exit(0)"), ADD),
    ]
    slow = reward(test_timeout_s=1.0, timeout_s=1.5)
    with RewardPool([slow], workers=2, timeout_s=0.5, check=lambda: None) as pool:
        ((right, endless, leaver),) = pool.score(samples)
    assert right == Score(1.0)
    assert (endless.value, endless.status) == (0.0, "ok")
    assert (leaver.value, leaver.status) == (0.0, "ok")
    assert {process.pid for process in psutil.Process().children(recursive=True)} == before
