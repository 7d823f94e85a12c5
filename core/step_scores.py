"""Steps of a response: where a text has them, the tokens that end them, their scores as columns."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import torch

from posttrain.core.batch import RolloutBatch
from posttrain.core.data.tokenization import ChatTokenizer
from posttrain.core.types import Score


def fill_steps(
    batch: RolloutBatch, scores: Sequence[Score], tokenizer: ChatTokenizer
) -> RolloutBatch:
    """`batch` with `step_end` [B, S] (-1 = none) and `step_score` [B, S] (0 = none).

    A step ends at the first sampled token after which the decoded text reaches the step's last
    character. Of a response of several turns the text, and so the steps, are those of the last.
    """
    num_steps = max([1, *(len(score.steps) for score in scores)])
    ends = torch.full((len(batch), num_steps), -1, dtype=torch.int64)
    values = torch.zeros(len(batch), num_steps)
    for row, score in enumerate(scores):
        if not score.steps:
            continue
        columns = batch.response_mask[row].nonzero().squeeze(1).tolist()
        breaks = [n for n in range(1, len(columns)) if columns[n] > columns[n - 1] + 1]
        columns = columns[breaks[-1] :] if breaks else columns
        ids = batch.response_ids[row][columns].tolist()
        for index, step in enumerate(score.steps):
            found = ending_token(ids, step.end, tokenizer)
            if found is not None:
                ends[row, index], values[row, index] = columns[found], step.correct
    return batch.with_columns(step_end=ends, step_score=values)


def step_ends(text: str, separator: str) -> tuple[int, ...]:
    """The character after each step of `text`, its separator included; blank steps are none."""
    ends, start = [], 0
    while start < len(text):
        found = text.find(separator, start)
        end = len(text) if found < 0 else found + len(separator)
        if text[start : end if found < 0 else found].strip():
            ends.append(end)
        start = end
    return tuple(ends)


def ending_token(ids: Sequence[int], end: int, tokenizer: ChatTokenizer) -> int | None:
    """Index of the first token after which the decoded text has `end` characters; None: never.

    Tokens and characters need not align, so prefixes are decoded, by bisection. Replacement
    characters at a prefix's end stand for a character of which some bytes are missing: not counted.
    """

    def reached(count: int) -> int:
        return len(tokenizer.decode_response(ids[:count]).rstrip("\ufffd"))

    count = bisect_left(range(len(ids) + 1), end, key=reached)
    return count - 1 if 0 < count <= len(ids) else None
