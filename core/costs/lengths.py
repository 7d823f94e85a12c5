"""How long prompts and responses will be: from the task's own problems and the model's tokenizer.

A model that was fine-tuned on worked answers comes to answer about as long as they are; of any
other nothing is known but the limit it is cut at.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from posttrain.core.contracts import Task
from posttrain.core.costs.shape import KnownModel
from posttrain.core.data.tokenization import ChatTokenizer
from posttrain.core.errors import PosttrainError
from posttrain.core.rollout_sampling import common_start
from posttrain.core.types import Problem

logger = logging.getLogger(__name__)

SAMPLE = 64
"""Problems that are looked at: their mean length is then known to a tenth of its own spread."""
ASSUMED_PROMPT = 64
"""Tokens of a prompt where no tokenizer is at hand: a short question in a chat template."""
ROWS_TO_END = 50
"""Worked answers read until the share of answers that run to their limit has fallen by a factor of
e. SmolLM2-135M on GSM8K, after 0, 2, 4 and 8 steps of 16 rows: 0.63, 0.42, 0.21 and 0.08 of the
greedy answers were cut at 192 tokens (docs/performance.md)."""
CHARACTERS_PER_TOKEN = 4
"""Of English text, where no tokenizer is at hand."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of prompts and of worked answers (their end included) of a sample of problems.

    `worked` is empty where the task has none; `known` says where the figures are from. The first
    `shared` tokens of a prompt are those of all prompts, as far as that is known.
    """

    prompts: tuple[int, ...]
    worked: tuple[int, ...]
    known: str
    shared: int = 0

    @property
    def prompt(self) -> float:
        """Mean tokens of a prompt."""
        return sum(self.prompts) / len(self.prompts)

    def longest_prompt(self, count: int) -> int:
        """The width that `count` prompts are padded to."""
        return longest_of(self.prompts, count)

    def responses(self, limit: int, *, read: float, nats: float = math.inf) -> Responses:
        """Responses of at most `limit` tokens by a model that has `read` so many worked answers.

        As those are, but for the share that runs on to the limit; infinity: worked answers. Its
        entropy is `nats` a token.
        """
        if not read or not self.worked:
            return Responses((limit,), nats)
        runs_on = math.exp(-read / ROWS_TO_END)
        cut = round(len(self.worked) * runs_on / (1 - runs_on))
        return Responses((*(min(limit, n) for n in self.worked), *(limit,) * cut), nats)


@dataclass(frozen=True, slots=True)
class Responses:
    """Response lengths in tokens, each as likely as the others, and the policy's entropy a token.

    Responses of one prompt that have said the same so far are computed once.
    """

    lengths: tuple[int, ...]
    nats: float = math.inf

    @property
    def mean(self) -> float:
        """Tokens of a response."""
        return sum(self.lengths) / len(self.lengths)

    def longest_of(self, rows: int) -> int:
        """The width that `rows` responses are padded to."""
        return longest_of(self.lengths, rows)

    def spread(self, count: int) -> tuple[int, ...]:
        """`count` lengths as they may fall together: evenly over all of them, the longest too."""
        return spread(self.lengths, count)

    def distinct(self, group: int, tokens: int) -> float:
        """Share of `group` responses that differ in their first `tokens`, as far as is expected.

        They are taken for draws from exp(nats x tokens) texts, all as likely.
        """
        texts = math.exp(min(700.0, self.nats * tokens)) if tokens else 1.0
        return (
            -texts * math.expm1(group * math.log1p(-1 / texts)) / group if texts > 1 else 1 / group
        )

    def computed(self, group: int) -> float:
        """Share of the tokens of `group` responses that are not another one's too."""
        mean = max(1, round(self.mean))
        return sum(self.distinct(group, tokens) for tokens in range(1, mean + 1)) / mean

    def running(self, step: int) -> float:
        """Share of responses that take a decoding step after their first `step` tokens."""
        return sum(length > step for length in self.lengths) / len(self.lengths)

    def any_running(self, step: int, rows: int) -> float:
        """The chance that one of `rows` responses takes it."""
        return 1.0 - (1.0 - self.running(step)) ** rows


def longest_of(lengths: Sequence[int], count: int) -> int:
    """About what the longest of `count` has: their (count - 1)/count quantile."""
    ordered = sorted(lengths)
    return ordered[min(len(ordered) - 1, int((1 - 1 / (count + 1)) * len(ordered)))]


def spread(lengths: Sequence[int], count: int) -> tuple[int, ...]:
    """`count` of `lengths`, evenly over their order; the last is the longest."""
    ordered = sorted(lengths)
    return tuple(ordered[-(-(i + 1) * len(ordered) // count) - 1] for i in range(count))


def measured_lengths(
    task: Task[Any], model: KnownModel | None, system_prompt: str | None, seed: int
) -> Lengths:
    """Lengths of training problems; assumed ones, and said so, without tokenizer or problems."""
    try:
        available = task.available("train")
        count = SAMPLE if available is None else min(SAMPLE, available)
        problems = task.problems("train", count, seed)
    except (PosttrainError, OSError) as error:
        logger.info("no problem could be looked at: %s", error)
        problems = []
    if not problems:
        return Lengths((ASSUMED_PROMPT,), (), f"prompts of {ASSUMED_PROMPT} tokens, assumed")
    tokenizer = None if model is None else _tokenizer(model, system_prompt)
    if tokenizer is None:
        return _by_characters(problems)
    worked = [tokenizer.encode_response(p.worked) for p in problems if p.worked]
    prompts = [tokenizer.encode_prompt(problem) for problem in problems]
    found = Lengths(
        tuple(map(len, prompts)),
        tuple(map(len, worked)) if len(worked) == len(problems) else (),
        "",
        common_start(prompts) if len(prompts) > 1 else 0,
    )
    answers = f", worked answers of {_mean(found.worked):.0f}" if found.worked else ""
    alike = f", {found.shared} of them the same in all" if found.shared else ""
    told = (
        f"prompts of {found.prompt:.0f} tokens{alike}{answers} (mean of {len(problems)} problems)"
    )
    return replace(found, known=told)


def _by_characters(problems: Sequence[Problem]) -> Lengths:
    """Lengths at four characters a token; a chat template's own tokens are not known."""
    prompts = tuple(-(-len(p.prompt) // CHARACTERS_PER_TOKEN) for p in problems)
    worked = tuple(-(-len(p.worked) // CHARACTERS_PER_TOKEN) + 1 for p in problems if p.worked)
    told = f"prompts of {_mean(prompts):.0f} tokens, at {CHARACTERS_PER_TOKEN} characters each"
    return Lengths(prompts, worked if len(worked) == len(prompts) else (), told)


def _tokenizer(model: KnownModel, system_prompt: str | None) -> ChatTokenizer | None:
    from transformers import AutoTokenizer

    if model.folder is None:
        return None
    options = {} if model.gguf is None else {"gguf_file": model.gguf}
    try:
        found = AutoTokenizer.from_pretrained(model.folder, local_files_only=True, **options)
        return ChatTokenizer(found, system_prompt)
    except (OSError, ValueError, PosttrainError) as error:
        logger.info("no tokenizer in %s: %s", model.folder, error)
        return None


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values)
