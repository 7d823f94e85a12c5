"""What is kept of a step that learned from given answers: its readings, with the texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from posttrain.core.analysis.evidence import StepEvidence
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.training.readings import StepReadings
from posttrain.core.types import Problem


def evidence_of(
    step: int, readings: StepReadings, keys: Sequence[str], tokenizer: ChatTokenizer
) -> StepEvidence:
    """The evidence of a step. `keys` name its rows, or its pairs of two answers each."""
    batch, seen = readings.batch, dict(readings.seen)
    assert batch is not None, "a step that is given readings fills them"
    named = [key for key in keys for _ in range(len(batch) // len(keys))]
    problems, texts = [], []
    for row, key in enumerate(named):
        prompt = batch.prompt_ids[row][batch.prompt_mask[row].bool()].tolist()
        answer = batch.response_ids[row][batch.response_mask[row].bool()].tolist()
        problems.append(Problem(key, str(tokenizer.tokenizer.decode(prompt)), "", ""))
        texts.append(tokenizer.decode_response(answer))
    unknown = torch.full(batch.response_ids.shape, float("nan"))
    return StepEvidence(
        step=step,
        batch=replace(batch, problems=tuple(problems), texts=tuple(texts)),
        seen_logprobs=seen.pop("logprobs", unknown),
        seen_entropy=seen.pop("entropy", unknown),
        seen_by=torch.zeros(len(batch), dtype=torch.int64),
        token_texts={
            token: tokenizer.token_text(token)
            for token in torch.unique(batch.response_ids).tolist()
        },
        given={**readings.given, **seen},
    )
