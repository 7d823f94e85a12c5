"""The `arithmetic` task."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.contracts import Task
from posttrain.core.errors import ConfigError, DataError
from posttrain.core.math.splits import split_of
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.types import Problem

MANAGER = PluginManager()
PROBLEM = Problem("23 + 45", "What is 23 + 45?", "68", "23 + 45 = 68")


def task(**fields: object) -> Task:  # type: ignore[type-arg]
    return MANAGER.build(Task, "arithmetic", fields)


def correct(text: str, **fields: object) -> float:
    return task(**fields).verify(PROBLEM, text).correct


def test_the_default_is_a_sum_of_two_two_digit_numbers() -> None:
    for problem in task().problems("train", 50, seed=0):
        match = re.fullmatch(r"What is (\d\d) \+ (\d\d)\?", problem.prompt)
        assert match is not None
        a, b = map(int, match.groups())
        assert problem.answer == str(a + b)
        assert problem.worked == f"{a} + {b} = {a + b}"
        assert problem.key == f"{min(a, b)} + {max(a, b)}"


def test_every_sum_is_in_exactly_one_split_whatever_the_seeds() -> None:
    everything = task()
    counts = {"train": 3695, "held_out": 400}
    keys = {
        split: {p.key for p in everything.problems(split, count, seed=i)}  # type: ignore[arg-type]
        for i, (split, count) in enumerate(counts.items())
    }
    # 90 operands: 90 * 91 / 2 unordered pairs.
    assert len(keys["train"]) + len(keys["held_out"]) == 4095
    assert not keys["train"] & keys["held_out"]


def test_a_seed_decides_the_order_and_another_one_gives_another() -> None:
    first = task().problems("train", 30, seed=1)
    assert first == task().problems("train", 30, seed=1)
    assert first != task().problems("train", 30, seed=2)
    assert [p.key for p in task().problems("train", 10, seed=1)] == [p.key for p in first[:10]]


def test_asking_for_more_than_there_is_says_how_many_there_are() -> None:
    with pytest.raises(DataError, match=r"has 400 distinct problems in its held_out split.*401"):
        task().problems("held_out", 401, seed=0)


def test_a_space_too_big_to_list_is_drawn_from_without_repeats() -> None:
    problems = task(left_digits=(9, 9), right_digits=(1, 9)).problems("held_out", 300, seed=0)
    assert len({p.key for p in problems}) == 300
    assert all(split_of(p.key, 100) == "held_out" for p in problems)
    assert problems == task(left_digits=(9, 9), right_digits=(1, 9)).problems("held_out", 300, 0)
    for problem in problems:
        left, right = re.findall(r"\d+", problem.prompt)
        assert len(left) == 9 and 1 <= len(right) <= 9


def test_operands_keep_their_own_numbers_of_digits() -> None:
    for problem in task(left_digits=(1, 1), right_digits=(3, 3)).problems("train", 50, seed=0):
        left, right = re.findall(r"\d+", problem.prompt)
        assert (len(left), len(right)) == (1, 3)


def test_differences_are_negative_only_when_allowed() -> None:
    plain = task(operators=["-"]).problems("train", 300, seed=0)
    assert all(int(p.answer) >= 0 for p in plain)
    signed = task(operators=["-"], allow_negative=True).problems("train", 300, seed=0)
    assert any(int(p.answer) < 0 for p in signed)
    stories = task(operators=["-"], allow_negative=True, style="word").problems("train", 300, 0)
    assert all(int(p.answer) >= 0 for p in stories)


@pytest.mark.parametrize("style", ["number", "word", "mixed"])
def test_every_style_asks_for_the_same_results(style: str) -> None:
    problems = task(style=style, operators=["+", "-", "*"]).problems("train", 200, seed=0)
    for problem in problems:
        a, operator, b, _, result = problem.worked.split()
        computed = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[operator]
        assert int(result) == computed == int(problem.answer)
        # The operands, and nothing else, stand in the question.
        assert sorted(re.findall(r"\d+", problem.prompt)) == sorted([a, b])
    styles = {problem.metadata["style"] for problem in problems}
    assert styles == ({"number", "word"} if style == "mixed" else {style})


def test_a_sum_has_one_wording_in_every_stage() -> None:
    first = {p.key: p for p in task(style="mixed").problems("train", 2000, seed=1)}
    again = {p.key: p for p in task(style="mixed").problems("train", 2000, seed=2)}
    shared = first.keys() & again.keys()
    assert shared and all(first[key] == again[key] for key in shared)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("68", 1.0),
        ("23 + 45 = 68", 1.0),
        ("23 + 45 = 68.", 1.0),
        ("The answer is **68**", 1.0),
        ("68.0", 1.0),
        ("23 + 45 = 6", 0.0),
        ("23 + 45", 0.0),
        ("68 or 69", 0.0),
        ("-68", 0.0),
        ("68.5", 0.0),
        ("680", 0.0),
        ("", 0.0),
        ("sixty-eight", 0.0),
    ],
)
def test_the_last_number_of_the_text_is_compared_by_value(text: str, value: float) -> None:
    assert correct(text) == value


def test_the_other_ways_to_match() -> None:
    assert correct("68 + 0 = 69", match="first_number") == 1.0
    assert correct("23 + 45 = 68", match="first_number") == 0.0
    assert correct(" 68\n", match="exact") == 1.0
    assert correct("= 68", match="exact") == 0.0


def test_what_was_read_is_reported() -> None:
    assert task().verify(PROBLEM, "it is 1,068").parsed == "1068"
    assert task().verify(PROBLEM, "no idea").parsed is None


@given(st.text())
def test_any_text_gets_a_verdict(text: str) -> None:
    for match in ("last_number", "first_number", "exact"):
        assert task(match=match).verify(PROBLEM, text).correct in (0.0, 1.0)


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"operators": ["/"]}, "operators.0"),
        ({"operators": []}, "operators"),
        ({"left_digits": [3, 2]}, "left_digits"),
        ({"right_digits": [0, 2]}, "right_digits"),
        ({"held_out_permille": 1000}, "held_out_permille"),
        ({"digits": 2}, "digits"),
    ],
)
def test_a_wrong_setting_is_named(fields: dict[str, object], place: str) -> None:
    with pytest.raises(ConfigError, match=f"task 'arithmetic': {place}:"):
        task(**fields)
