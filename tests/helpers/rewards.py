"""Samples for rewards, and their scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from posttrain.core.contracts import Reward
from posttrain.core.rewards.pool import RewardPool
from posttrain.core.types import Problem, RewardSample, Score, Verdict
from tests.helpers.plugins import MANAGER


def sample(
    text: str = "",
    answer: str = "2",
    *,
    prompt: str = "What is 1 + 1?",
    prompt_ids: Sequence[int] = (1,),
    response_ids: Sequence[int] = (2, 3),
    truncated: bool = False,
    correct: float = 0.0,
    metadata: Mapping[str, str] | None = None,
) -> RewardSample:
    """A response to a problem."""
    problem = Problem("k", prompt, answer, "", metadata or {})
    verdict = Verdict(correct, text or None)
    return RewardSample(problem, tuple(prompt_ids), tuple(response_ids), text, truncated, verdict)


def scores(name: str, samples: Sequence[RewardSample], **fields: object) -> list[Score]:
    """The scores that reward `name` gives."""
    reward: Reward[object] = MANAGER.build(Reward, name, fields)  # type: ignore[type-var]
    return reward.score(samples)


@contextmanager
def pooled(name: str) -> Iterator[Callable[[Sequence[RewardSample]], list[Score]]]:
    """What gives the scores of reward `name` in a pool of one worker, as runs do.

    A reward that forks for each answer does so in a process that holds little: after an hour of
    tests a fork of theirs takes 0.4 s.
    """
    with RewardPool([MANAGER.build(Reward, name)], workers=1, timeout_s=30) as pool:
        yield lambda samples: pool.score(samples)[0]


def score(name: str, one: RewardSample, **fields: object) -> Score:
    """The score that reward `name` gives one response."""
    return scores(name, [one], **fields)[0]
