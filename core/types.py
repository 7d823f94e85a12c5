"""Values that cross a boundary: problems, completions, scores. Plain frozen dataclasses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length"]
ScoreStatus = Literal["ok", "unscored", "error"]
Split = Literal["train", "held_out"]


@dataclass(frozen=True, slots=True)
class Problem:
    """One prompt of a task, with what its verifier and SFT need.

    `key` is the canonical content of the problem: two problems with one key are the same problem,
    and a key belongs to exactly one split.
    """

    key: str
    prompt: str
    answer: str
    worked: str
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a task's verifier says of one answer: `correct` in [0, 1] and what it read."""

    correct: float
    parsed: str | None


@dataclass(frozen=True, slots=True)
class StepVerdict:
    """The verdict on one step of an answer: `correct` in [0, 1]; `end` is the character after."""

    end: int
    correct: float


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How an engine draws responses. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off."""

    num_generations: int = 1
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """One response as the engine sampled it: token ids in, token ids out, nothing re-tokenised.

    `logprobs` are nats under the distribution that was sampled from (log-softmax of logits /
    temperature, renormalised when top-p or top-k cut it), one per token id. The end-of-sequence
    token is part of `token_ids` when it was sampled; `finish_reason` is `length` when the limit cut
    the response.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    policy_version: int
    seed: int
    engine: str
    engine_version: str


@dataclass(frozen=True, slots=True)
class RewardSample:
    """What a reward plugin sees of one response."""

    problem: Problem
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    text: str
    truncated: bool
    verdict: Verdict
    steps: tuple[StepVerdict, ...] = ()


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of one sample; `value` None means it could not be scored: never a zero.

    `steps` are the scores of the response's steps, from rewards that give them.
    """

    value: float | None
    status: ScoreStatus = "ok"
    detail: str = ""
    steps: tuple[StepVerdict, ...] = ()
