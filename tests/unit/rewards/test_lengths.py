"""Rewards `"length_penalty"`, `"length_group_rel"`, `"stop_properly"` and `"repetition"`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posttrain.core.errors import ConfigError
from posttrain.core.types import Problem
from tests.helpers.rewards import sample, score, scores

RECORDED = Path(__file__).resolve().parents[2] / "golden" / "data" / "trl_reward_shape.json"


def tokens(count: int) -> tuple[int, ...]:
    return tuple(range(count))


def test_every_token_beyond_the_free_ones_has_its_price() -> None:
    rows = [sample(response_ids=tokens(n)) for n in (0, 3, 10)]
    assert [s.value for s in scores("length_penalty", rows, alpha=0.5)] == [0.0, -1.5, -5.0]
    found = scores("length_penalty", rows, alpha=0.5, free_tokens=4)
    assert [str(s.value) for s in found] == ["0.0", "0.0", "-3.0"]  # no negative zero


def test_length_costs_by_the_success_and_the_longest_of_its_own_group() -> None:
    group = [  # episodes of one problem may begin with prompts of their own
        sample(prompt_ids=(n,), response_ids=tokens(n), correct=c)
        for n, c in ((10, 1.0), (20, 1.0), (40, 0.0), (0, 0.0))
    ]
    other = Problem("other", "What is 2 + 2?", "4", "")
    unsolved = [replace(sample(response_ids=tokens(n)), problem=other) for n in (5, 50)]
    # mean 0.5, longest 40: -0.2 * 0.5 * n / 40
    wanted = {10: -0.025, 20: -0.05, 40: -0.1, 0: 0.0, 5: 0.0, 50: 0.0}
    mixed = [group[0], unsolved[0], *group[1:], unsolved[1]]
    found = scores("length_group_rel", mixed, factor=0.2)
    for one, given in zip(mixed, found, strict=True):
        assert given.value == pytest.approx(wanted[len(one.response_ids)])
    empty = sample(response_ids=(), correct=1.0)
    assert score("length_group_rel", empty).value == 0.0


@pytest.mark.parametrize(
    ("mode", "coef", "right", "wrong"),
    [
        ("scale", 0.0, -1.0, 0.0),  # in addition to accuracy: 0 and 0
        ("scale", 0.5, -0.5, 0.0),  # 0.5 and 0
        ("scale", 1.0, 0.0, 0.0),  # as if it had ended
        ("set", -1.0, -2.0, -1.0),  # -1 and -1
        ("subtract", 0.5, -0.5, -0.5),  # 0.5 and -0.5
    ],
)
def test_a_cut_response_gets_the_reward_that_its_mode_says(
    mode: str, coef: float, right: float, wrong: float
) -> None:
    rows = [sample(truncated=True, correct=c) for c in (1.0, 0.0)]
    found = scores("stop_properly", rows, mode=mode, coef=coef)
    assert [s.value for s in found] == [right, wrong]
    assert {s.detail for s in found} == {"cut by the length limit"}
    ended = score("stop_properly", sample(correct=1.0), mode=mode, coef=coef)
    assert (ended.value, ended.detail) == (0.0, "")


def test_coefficients_that_a_mode_has_no_use_for_are_refused() -> None:
    for mode, coef in (("scale", 1.5), ("scale", -0.1), ("subtract", -1.0)):
        with pytest.raises(ConfigError, match=f"coef is {coef}"):
            score("stop_properly", sample(), mode=mode, coef=coef)


def recorded() -> list[Any]:  # Any: JSON
    cases = json.loads(RECORDED.read_text("utf-8"))
    return [c for c in cases if c["function"] == "get_repetition_penalty_reward"]


def test_repetition_gives_trls_numbers() -> None:
    assert recorded()
    for case in recorded():
        rows = [sample(response_ids=ids) for ids in case["inputs"]["completion_ids"]]
        params = case["params"]
        fields = {"ngram": params["ngram_size"], "penalty": -params["max_penalty"]}
        found = [s.value for s in scores("repetition", rows, **fields)]
        assert found == pytest.approx(case["outputs"]["rewards"], rel=1e-6)


def test_repetition_of_words_is_that_of_the_text() -> None:
    # a b, b a, a b, b a: two of four pairs are new
    assert score("repetition", sample("A b a B\na"), ngram=2, unit="words").value == -0.5
    assert str(score("repetition", sample("a b"), unit="words").value) == "0.0"
    assert score("repetition", sample(""), unit="words").value == 0.0
    assert score("repetition", sample("a " * 10_000), unit="words").value == pytest.approx(
        -1 + 1 / 9998
    )
