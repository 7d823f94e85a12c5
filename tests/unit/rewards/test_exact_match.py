"""The reward `"exact_match"`."""

from __future__ import annotations

import pytest

from posttrain.core.errors import ConfigError
from posttrain.core.types import Score
from tests.helpers.rewards import sample, score


def value(answer: str, text: str, **fields: object) -> float | None:
    return score("exact_match", sample(text, answer), **fields).value


def test_without_a_marker_the_whole_text_is_the_answer() -> None:
    assert value("a b", " a b\n") == 1.0
    assert value("a b", "it is a b") == 0.0
    assert score("exact_match", sample("c", "a b")).detail == "read 'c'"


def test_the_answer_stands_after_the_last_marker() -> None:
    assert value("5", "A: 4\nA: 5", marker="A:") == 1.0
    assert value("4", "A: 4\nA: 5", marker="A:") == 0.0
    missing = score("exact_match", sample("5", "5"), marker="A:")
    assert missing == Score(0.0, detail="no answer found")


def test_a_pattern_gives_its_first_group_or_all_of_its_last_match() -> None:
    assert value("5", "<a>4</a> <a>5</a>", pattern=r"<a>(.*?)</a>") == 1.0
    assert value("5", "4 and 5.", pattern=r"\d+") == 1.0
    assert value("5", "none", pattern=r"\d+") == 0.0
    # A group that took no part in the match is an empty answer.
    assert value("5", "x", pattern=r"x(5)?") == 0.0


def test_case_and_white_space_count_as_told() -> None:
    assert value("Stra\u00dfe", "STRASSE", ignore_case=True) == 1.0
    assert value("Stra\u00dfe", "STRASSE") == 0.0
    spaced = {"strip": 0.0, "collapse": 1.0, "remove": 1.0, "keep": 0.0}
    assert {how: value("a b", " a \n b ", white_space=how) for how in spaced} == spaced
    assert value("ab", "a b", white_space="remove") == 1.0
    assert value("ab", "a b", white_space="collapse") == 0.0
    assert value("a ", "a", white_space="keep") == 0.0


def test_a_problem_without_a_reference_is_an_error_and_no_zero() -> None:
    found = score("exact_match", sample("", " "))
    assert (found.value, found.status) == (None, "error")


def test_settings_that_contradict_or_do_not_compile_are_refused() -> None:
    with pytest.raises(ConfigError, match="not both"):
        value("5", "5", marker="A:", pattern="x")
    with pytest.raises(ConfigError, match="not a regular expression"):
        value("5", "5", pattern="(")
