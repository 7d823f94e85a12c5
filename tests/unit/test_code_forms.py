"""Where a response has its program, the forms of tests, and which outputs are equal."""

from __future__ import annotations

import json

import pytest

from posttrain.core.sandbox.harness import equals_json
from posttrain.core.sandbox.unit_tests import _same_output, read_tests
from posttrain.plugins.rewards.code_tests import program_in

P = "print(3)"


@pytest.mark.parametrize(
    "text",
    [
        f"```python\n{P}\n```",
        f"```python3\n{P}\n```",
        f"```py\n{P}\n```",
        f"```Python\n{P}\n```",
        f"``` python\n{P}\n```",
        f"```\n{P}\n```",
        f"~~~python\n{P}\n~~~",
        f"~~~\n{P}\n~~~",
        f"````python\n{P}\n````",
        f"```python\n{P}\n",
        f"```python\n{P}",
        f"```python\n{P}```",
        f"Code: ```python\n{P}\n```",
        f"Code: ```python {P}```",
        f"- a\n  ```python\n  {P}\n  ```",
        f"> ```python\n{P}\n> ```",
        f"```python\r\n{P}\r\n```".replace("\r\n", "\n"),
        f"```bash\nls\n```\n```python\n{P}\n```",
        f"```python\n{P}\n```\n```text\n3\n```",
        f"```python\nprint(2)\n```\nBetter:\n```python\n{P}\n```",
        f"```ipython\n{P}\n```",
        f"```python3.11\n{P}\n```",
        f"```python\n{P}\n```.",
        f"```python\n{P}\n```<|im_end|>",
        f"> ```python\n> {P}\n> ```",
        f"```\n{P}\n```\nOutput:\n```\n3\n```",
        f"```python\n{P}\n```\nInput:\n```python\n5 3\n```",
        f"```python\n{P}\n```\n```python\n>>> f(1)\n2\n```",
        f"```python\n{P}\n```\nRun it:\n```python\n$ python a.py\n```",
        f"```python\n{P}\n```\n```python\n# Output: 3\n```",
        f"<think>\n```python\nprint(4)\n</think>\n```python\n{P}\n```",
        f"```python\nprint(4)\n\nBetter:\n```python\n{P}\n```",
        f"```python\nx = 4\n\n```python\n{P}\n```",
    ],
)
def test_a_block_is_found_however_it_is_fenced(text: str) -> None:
    assert program_in(text).strip() == P


def test_of_several_blocks_the_program_is_taken() -> None:
    main = "def f(): return 2\nprint(f())"
    assert program_in(f"```python\n{main}\n```\nUse:\n```python\nf()\n```").strip() == main
    apart = program_in("```python\ndef f(): return 2\n```\n```python\nprint(f())\n```")
    assert "def f" in apart and "print" in apart
    text = "```python\ndef f(): return 2\n```\n```python\nprint('demo')\n```"
    assert program_in(text, "assert f() == 2").strip() == "def f(): return 2"
    fenced = '"""\n```\nx\n```\n"""\nprint(2)'
    assert program_in(f"```python\n{fenced}\n```").strip() == fenced


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        ("3\n", "3", True),
        ("3 ", "3", True),
        ("3\r\n4\r\n", "3\n4", True),
        ("3\n\n", "3\n", True),
        ("3", "4", False),
        ("3 4", "3\n4", False),
        ("0.66666666", "0.666666666666", True),
        ("0.6667", "0.666666666666", False),
        ("2", "2.0", True),
        ("2.0", "2", False),
        ("1e-3", "0.001", True),
        ("nan", "nan", True),
        ("nan", "1.0", False),
        ("inf", "1e999", False),
        ("9007199254740993", "9007199254740992", False),
        ("1" * 6000, "1" * 6000, True),
        ("1" * 6000, "1" * 5999 + "2", False),
        ("a 1.0000000001", "a 1.0", True),
        ("b 1.0", "a 1.0", False),
        ("Yes", "yes", False),
    ],
)
def test_outputs(got: str, expected: str, same: bool) -> None:
    assert _same_output(got, expected) is same


@pytest.mark.parametrize(
    ("tests", "pairs"),
    [
        ({"inputs": ["1"], "outputs": ["2"]}, [("1", "2")]),
        ({"inputs": ["1", "3"], "outputs": ["2", "4"]}, [("1", "2"), ("3", "4")]),
        ({"inputs": [["1", "2"]], "outputs": [["3", "4"]]}, [("1\n2", "3\n4")]),
        ({"inputs": [1], "outputs": [2]}, [("1", "2")]),
        ([{"input": "", "output": 2}], [("", "2")]),
        ([{"input": "", "output": 2.5}], [("", "2.5")]),
        ([{"input": "", "output": [1, 2]}], [("", "1\n2")]),
        ([{"input": "", "output": True}], [("", "True")]),
        ([{"input": "1", "expected_output": "2"}], [("1", "2")]),
        ([{"stdin": "1", "stdout": "2"}], [("1", "2")]),
        ([{"input": "1", "output": "2", "testtype": "stdin"}], [("1", "2")]),
        ({"input": "1", "output": "2"}, [("1", "2")]),
        ({"input": ["1", "3"], "output": ["2", "4"]}, [("1", "2"), ("3", "4")]),
        ({"input": ["1", "3"], "output": ["2"]}, [("1\n3", "2")]),
        (str([{"input": "1", "output": "2"}]), [("1", "2")]),
        (str({"inputs": ["1"], "outputs": ["2"]}), [("1", "2")]),
        (json.dumps([{"input": "1", "output": "2"}]), [("1", "2")]),
    ],
)
def test_pairs_are_read_in_all_forms(tests: object, pairs: list[tuple[str, str]]) -> None:
    assert [(t.input, t.output) for t in read_tests(json.dumps(tests))] == pairs


def solves(code: str, tests: object, entry_point: str = "") -> bool:
    text = tests if isinstance(tests, str) else json.dumps(tests)
    try:
        for test in read_tests(text, entry_point):
            names: dict[str, object] = {"__equals_json": equals_json}
            exec(code, names)  # noqa: S102 - the cases below
            exec(test.code, names)  # noqa: S102
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize(
    ("body", "tests", "right"),
    [
        ("a + 1", {"inputs": [[1]], "outputs": [2], "fn_name": "f"}, True),
        ("a + 2", {"inputs": [[1]], "outputs": [2], "fn_name": "f"}, False),
        ("a + 1", {"inputs": [[1]], "outputs": [[2]], "fn_name": "f"}, True),
        ("[a, 2]", {"inputs": [[1]], "outputs": [[1, 2]], "fn_name": "f"}, True),
        ("(a, 2)", {"inputs": [[1]], "outputs": [[1, 2]], "fn_name": "f"}, True),
        ("[a, 2]", {"inputs": [[1]], "outputs": [[[1, 2]]], "fn_name": "f"}, True),
        ("a / 3", {"inputs": [[1]], "outputs": [0.3333333333], "fn_name": "f"}, True),
        ("a / 4", {"inputs": [[1]], "outputs": [0.3333333333], "fn_name": "f"}, False),
        ("[a / 3, 1]", {"inputs": [[1]], "outputs": [[0.3333333333, 1]], "fn_name": "f"}, True),
        ("[a / 4, 1]", {"inputs": [[1]], "outputs": [[0.3333333333, 1]], "fn_name": "f"}, False),
        ("[a / 3]", {"inputs": [[1]], "outputs": [0.3333333333], "fn_name": "f"}, False),
        (
            "[(1, a), (2, 3)]",
            {"inputs": [[1]], "outputs": [[[1, 1], [2, 3]]], "fn_name": "f"},
            True,
        ),
        (
            "[(1, a), (2, 3)]",
            {"inputs": [[1]], "outputs": [[[1, 1], [2, 4]]], "fn_name": "f"},
            False,
        ),
        ("{a: 2}", {"inputs": [[1]], "outputs": [{"1": 2}], "fn_name": "f"}, True),
        ("{a: 2.0000000001}", {"inputs": [[1]], "outputs": [{"1": 2.0}], "fn_name": "f"}, True),
        ("{a: 2}", {"inputs": [[1]], "outputs": [{"2": 2}], "fn_name": "f"}, False),
        ("[a, a]", {"inputs": [[1]], "outputs": [[1, 1, 1]], "fn_name": "f"}, False),
        ("sum(a)", {"inputs": ["[1, 2]"], "outputs": ["3"], "fn_name": "f"}, True),
        ("a + 1", {"test_list": ["assert f(1) == 2"]}, True),
        ("a + 2", str(["assert f(1) == 2"]), False),
        ("a + 1", {"input": [1], "output": 2, "fn_name": "f"}, True),
        ("[a, b]", {"input": [1, 2], "output": [1, 2], "fn_name": "f"}, True),
    ],
)
def test_calls_are_read_in_all_forms(body: str, tests: object, right: bool) -> None:
    assert solves(f"def f(a, b=0): return {body}", tests) is right


def test_human_eval_and_solution_classes() -> None:
    check = "def check(candidate):\n    assert candidate(1) == 2\n"
    assert solves("def f(a): return a + 1", check, "f")
    assert solves("def f(a): return a + 1", {"test": check, "entry_point": "f"})
    assert not solves("def f(a): return a", [check], "f")
    method = "class Solution:\n    def f(self, a): return a + 1"
    assert solves(method, {"inputs": [[1]], "outputs": [2], "fn_name": "f"})
    with pytest.raises(ValueError, match="entry_point"):
        read_tests(check)
    with pytest.raises(ValueError, match="entry_point"):
        read_tests('[{"input": "1", "output": "2", "testtype": "functional"}]')
    with pytest.raises(ValueError, match="no program can fail"):
        read_tests('["f", "2"]')
    with pytest.raises(ValueError, match="2 inputs and 1 outputs"):
        read_tests('{"inputs": ["1", "2"], "outputs": ["1"]}')
