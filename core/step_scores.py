"""Scores of a response's steps as columns: the token that ends each step, and its score."""

from __future__ import annotations

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
    character. Tokens and characters need not align, so the response is decoded prefix by prefix.
    Of a response of several turns the text, and so the steps, are those of the last turn.
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
        reached = [len(tokenizer.decode_response(ids[: n + 1])) for n in range(len(ids))]
        for index, step in enumerate(score.steps):
            fits = (column for column, end in zip(columns, reached, strict=True) if end >= step.end)
            found = next(fits, None)
            if found is not None:
                ends[row, index], values[row, index] = found, step.correct
    return batch.with_columns(step_end=ends, step_score=values)
