"""What rewards promise."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from posttrain.core.contracts import Reward
from posttrain.core.kit.checks import Skipped, Subject, check, expect, expect_equal
from posttrain.core.rewards.protocol import specs_of
from posttrain.core.types import Problem, RewardSample, Score, ScoreStatus, Verdict

SLOW_S = 1.0
"""Seconds for one sample of ordinary length that are too many."""
PIECES = (
    *("<think>", "</think>", "<answer>", "</answer>", "<tool_call>", "</tool_call>", "\\boxed{"),
    *("#### ", "}", "\\frac{1}{2}", "$", "1,234", "-3.5%", "x^2", "½", "١", "\x00", "abc", "2 "),
    *('{"name": "f", "arguments": {}}', "[1, 2]", "```json\n", "\n```", "{{{", "\\", "\n\n"),
    *("[END RESPONSE]", "{response}", "Score: 10", "\U0001f600", "\ud800", " word " * 50),
)
ANSWERS = ("2", "1/2", "", "blue", "\\frac{1}{2}", "((", "{}")


def sample_of(
    text: str,
    answer: str = "2",
    *,
    prompt: int = 1,
    tokens: Sequence[int] = (2, 3),
    truncated: bool = False,
    correct: float = 0.0,
) -> RewardSample:
    """What a reward sees of a response."""
    problem = Problem("k", "What is 1 + 1?", answer, "")
    verdict = Verdict(correct, text or None)
    return RewardSample(problem, (prompt,), tuple(tokens), text, truncated, verdict)


def _samples(seed: int) -> list[RewardSample]:
    rng = random.Random(seed)
    return [
        sample_of(
            "".join(rng.choice(PIECES) for _ in range(rng.randint(0, 10))),
            rng.choice(ANSWERS),
            prompt=rng.randint(0, 2),
            tokens=[rng.randint(0, 5) for _ in range(rng.randint(0, 12))],
            truncated=rng.random() < 0.5,
            correct=rng.choice((0.0, 0.5, 1.0)),
        )
        for _ in range(rng.randint(0, 4))
    ]


def _alone(subject: Subject) -> Reward[Any]:  # Any: rewards of any config
    if subject.cls.needs_inputs:
        raise Skipped("it reads a model, which only a stage has")
    made: Reward[Any] = subject.build()
    return made


def _batches() -> Iterator[list[RewardSample]]:
    yield [sample_of("", tokens=())]
    yield from (_samples(seed) for seed in range(40))


@check("one sound score per sample, whatever the text: never NaN, never a silent None", "reward")
def _sound(subject: Subject) -> None:
    reward = _alone(subject)
    for samples in _batches():
        found = reward.score(samples)
        expect_equal(len(found), len(samples), "scores")
        for sample, score in zip(samples, found, strict=True):
            _expect_sound(score, f"for the text {sample.text[:60]!r}")


def _expect_sound(score: object, where: str) -> None:
    if not isinstance(score, Score):
        expect(False, f"{where} it gives {type(score).__name__}, not Score")
        return
    value = score.value
    expect(score.status in get_args(ScoreStatus), f"{where} the status is {score.status!r}")
    expect(value is None or math.isfinite(value), f"{where} the score is {value}")
    expect(
        (value is None) == (score.status != "ok"),
        f"{where} the value is {value} and the status '{score.status}': None goes with 'unscored'",
    )
    expect(value is not None or score.detail, f"{where} it is unscored without a `detail`")
    odd = sorted(n for n, part in score.components.items() if not math.isfinite(part))
    expect(not odd, f"{where} the components {odd} are not finite")
    expect(len(score.detail) < 500, f"{where} `detail` has {len(score.detail)} characters")


@check("the same scores each time, wherever a sample stands", "reward")
def _determinism(subject: Subject) -> None:
    for samples in _batches():
        found = _alone(subject).score(samples)
        expect_equal(_alone(subject).score(samples), found, "scores of the same samples")
        backwards = _alone(subject).score(samples[::-1])
        expect_equal(backwards, found[::-1], "scores of the samples in reverse")
    expect_equal(_alone(subject).score([]), [], "scores of no samples")


@check("texts of a megabyte are scored too", "reward")
def _long_texts(subject: Subject) -> None:
    texts = ["a " * 500_000, "{" * 1_000_000, "<think>" * 150_000, "1 + " * 250_000]
    samples = [sample_of(text, tokens=range(1000)) for text in texts]
    expect_equal(len(_alone(subject).score(samples)), len(samples), "scores")


@check("an ordinary response takes well under a second", "reward")
def _timing(subject: Subject) -> None:
    reward = _alone(subject)
    samples = [sample_of("The answer is 2.", correct=1.0)]
    reward.score(samples)  # what it imports when it is first used does not count
    began = time.perf_counter()
    reward.score(samples)
    took = time.perf_counter() - began
    limit = reward.time_limit_s() or SLOW_S
    expect(took < limit, f"one sample took {took:.1f} s, at most {limit:g} s are fine")


@check("worker processes can build it", "reward")
def _in_workers(subject: Subject) -> None:
    if subject.cls.runs_in == "host":
        raise Skipped("it runs in the trainer's process")
    (spec,) = specs_of([subject.build()])
    expect(spec.load(Reward) is subject.cls, "its module has another class of that name")
    expect_equal(spec.make(Reward).config, subject.build().config, "the settings of a worker's")
