"""Patterns of rewards on responses made to show them, and on ones made not to."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from posttrain.core.analysis.evidence import StepEvidence
from posttrain.core.analysis.forensics import (
    Pattern,
    Response,
    find_patterns,
    ratio_means,
    repeated_across_prompts,
    repeated_in_group,
    repetition,
)
from posttrain.core.config.rl_stage import TOTAL
from posttrain.core.kit.batches import build_batch
from posttrain.core.types import Score


def response(number: int, **given: object) -> Response:
    """Response `number` of a group of five: its own text, length, reward and a right answer."""
    values: dict[str, object] = {
        "step": 1,
        "row": number,
        "group": (1, number // 5),
        "prompt": f"prompt {number // 5}",
        "text": f"answer number {number}, in words of its own",
        "token_ids": tuple(range(number % 7 + 3)),
        "reward": float(number % 2),
        "correct": 1.0,
        "scores": {"a": Score(float(number % 2)), TOTAL: Score(float(number % 2))},
    }
    return Response(**{**values, **given})  # type: ignore[arg-type]


def found(make: Callable[[int], Response], name: str, count: int = 40) -> Pattern:
    """The statistic `name` of reward `a`, or of the responses."""
    patterns = find_patterns([make(number) for number in range(count)])
    return next(p for p in patterns if p.name == name and p.subject in ("a", "responses"))


def scored(number: int, value: float | None, **given: object) -> Response:
    score = Score(value) if value is not None else Score(None, "timeout")
    return response(number, scores={"a": score, TOTAL: score}, **given)


def test_nothing_is_suspicious_of_rewards_that_pay_for_right_answers() -> None:
    assert [p.name for p in find_patterns([response(n) for n in range(40)]) if p.suspicious] == []


def test_a_reward_that_grows_with_length_is_found() -> None:
    pattern = found(lambda n: scored(n, float(n % 7)), "length_correlation")
    assert pattern.value == pytest.approx(1.0)
    assert pattern.suspicious
    assert pattern.examples[0].length == 9  # the longest
    falls = found(lambda n: scored(n, -float(n % 7)), "length_correlation")
    assert (falls.value, falls.suspicious) == (pytest.approx(-1.0), True)


def test_garble_is_found_by_two_means_that_differ() -> None:
    """Ratios 1 and 1e-6 in halves: arithmetic mean 0.5, geometric 0.001."""
    pattern = found(
        lambda n: response(n, ratio_means=(0.5, 0.001) if n == 7 else (1.1, 1.05)), "garbled"
    )
    assert pattern.suspicious and pattern.value == pytest.approx(1 / 40)
    assert [example.row for example in pattern.examples] == [7]
    unknown = found(lambda n: response(n), "garbled")
    assert (unknown.value, unknown.suspicious, unknown.count) == (None, None, 0)


def test_both_means_are_of_the_sampled_tokens() -> None:
    mask = torch.tensor([[1.0] * 100 + [0.0], [1.0] + [0.0] * 100, [1.0, 1.0] + [0.0] * 99])
    engine = torch.full_like(mask, -1.0)
    batch = build_batch(mask, rollout_logprobs=engine)
    seen = engine.clone()
    seen[0, 50:] += math.log(1e-6)
    seen[2, 1] = math.nan
    evidence = StepEvidence(1, batch, seen, seen, torch.zeros(3, dtype=torch.int64))
    assert ratio_means(evidence, 0) == (pytest.approx(0.5, rel=1e-5), pytest.approx(1e-3))
    assert ratio_means(evidence, 1) == (1.0, 1.0)
    assert ratio_means(evidence, 2) is None


def test_repetition_that_pays_is_found() -> None:
    def make(number: int) -> Response:
        loops = number % 2 == 0
        ids = (1, 2, 3) * 4 if loops else tuple(range(12))
        return scored(number, 1.0 if loops else 0.0, token_ids=ids)

    pattern = found(make, "repetition_rewarded")
    assert pattern.suspicious
    assert pattern.examples[0].token_ids == (1, 2, 3) * 4

    def punished(number: int) -> Response:
        made = make(number)
        return scored(number, float(number % 2), token_ids=made.token_ids)

    other = found(punished, "repetition_rewarded")
    assert not other.suspicious


def test_repetition_is_one_less_the_share_of_distinct_ngrams() -> None:
    assert repetition((1, 2, 3, 1, 2, 3)) == pytest.approx(1 / 4)  # 123 231 312 123
    assert repetition((1, 2, 3)) == 0.0
    assert repetition((1, 2)) is None


def test_form_that_pays_without_the_answer_is_found() -> None:
    def make(number: int) -> Response:
        return scored(number, float(number < 30), correct=float(number < 12))

    pattern = found(make, "high_score_wrong_answer")
    assert (pattern.value, pattern.count, pattern.suspicious) == (18 / 30, 30, True)
    honest = found(lambda n: scored(n, float(n < 30), correct=float(n < 30)), pattern.name)
    assert (honest.value, honest.suspicious) == (0.0, False)


def test_failures_are_apart_from_zeros() -> None:
    pattern = found(lambda n: scored(n, None if n % 4 == 0 else 0.0), "failures")
    assert (pattern.value, pattern.suspicious) == (0.25, True)
    assert found(lambda n: scored(n, 0.0), "failures").value == 0.0


def test_a_reward_that_never_varies_is_found() -> None:
    assert found(lambda n: scored(n, 0.3), "constant_reward").suspicious
    assert not found(lambda n: scored(n, 0.3 + n), "constant_reward").suspicious


def test_duplicates_within_and_across_groups_are_told_apart() -> None:
    def collapsed(number: int) -> Response:
        return response(number, text=f"the same  answer for prompt {number // 5}")

    assert found(collapsed, "duplicates_in_group").value == 1.0
    assert found(collapsed, "duplicates_across_prompts").value == 0.0

    def generic(number: int) -> Response:
        return response(number, text=f"an answer that fits anything {number % 5}")

    assert found(generic, "duplicates_in_group").value == 0.0
    assert found(generic, "duplicates_across_prompts").suspicious


def test_white_space_makes_no_other_text() -> None:
    pair = [response(0, text="a  b\n"), response(1, text=" a b")]
    assert repeated_in_group(pair) == pair
    assert repeated_across_prompts(pair) == []


def test_few_responses_say_nothing() -> None:
    patterns = find_patterns([scored(n, 0.3) for n in range(19)])
    assert {p.suspicious for p in patterns} == {None}
