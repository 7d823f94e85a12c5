"""Ragged token lists to the padded tensors of a `RolloutBatch`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import SampledGroup
from posttrain.core.data.tokenization import ChatTokenizer
from posttrain.core.types import Completion, Problem


def pad_left(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Ids [B, L] and mask [B, L] (int64), real tokens at the right."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def pad_right(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Ids [B, T] and mask [B, T] (int64), real tokens at the left."""
    width = max(1, *map(len, rows))
    ids = torch.tensor([list(row) + [pad] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return ids, mask


def response_batch(
    *,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    group_ids: Sequence[int],
    pad_token_id: int,
    problems: Sequence[Problem],
    texts: Sequence[str] = (),
    response_logprobs: Sequence[Sequence[float]] | None = None,
    policy_versions: Sequence[int] | None = None,
    truncated: Sequence[bool] | None = None,
    sampled: Sequence[Sequence[bool]] = (),
    node_ids: Sequence[Sequence[int]] = (),
    transcripts: Sequence[str] = (),
    turns: Sequence[tuple[str, ...]] = (),
) -> RolloutBatch:
    """A batch of one row per response. Rows of one group share a prompt.

    Log-probs that nobody gave are NaN, so that nothing can take them for real. `sampled` says of
    each token whether the policy sampled it (an empty row = all of them): the others, observations,
    are in no mask. Tokens without a tree node, padding too, have node -1.
    """
    num_rows = len(responses)
    prompt_ids, prompt_mask = pad_left(prompts, pad_token_id)
    response_ids, response_mask = pad_right(responses, pad_token_id)
    logprobs = torch.full(response_ids.shape, float("nan"))
    if response_logprobs is not None:
        logprobs = torch.zeros(response_ids.shape)
        for row, values in enumerate(response_logprobs):
            logprobs[row, : len(values)] = torch.tensor(values, dtype=torch.float32)
    for row, own in enumerate(sampled):
        response_mask[row, : len(own)] *= torch.tensor(own, dtype=torch.int64)
    versions = torch.tensor(policy_versions or [0] * num_rows)
    batch = RolloutBatch(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        response_ids=response_ids,
        response_mask=response_mask,
        mask=response_mask.clone(),
        rollout_logprobs=logprobs,
        policy_version=versions[:, None].expand(response_ids.shape).contiguous(),
        group_id=torch.tensor(group_ids, dtype=torch.int64),
        seq_id=torch.arange(num_rows),
        truncated=torch.tensor(truncated or [False] * num_rows),
        problems=tuple(problems),
        texts=tuple(texts),
        transcripts=tuple(transcripts),
        turns=tuple(turns),
    )
    if any(node_ids):
        nodes = torch.full(response_ids.shape, -1, dtype=torch.int64)
        for row, ids in enumerate(node_ids):
            nodes[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
        batch = batch.with_columns(node_id=nodes)
    batch.validate()
    return batch


@dataclass(frozen=True, slots=True)
class ResponseTexts:
    """What verifiers read of a response: its last turn, all turns of the policy, and all of it."""

    last: str
    turns: tuple[str, ...]
    transcript: str


def response_texts(completion: Completion, tokenizer: ChatTokenizer) -> ResponseTexts:
    """The texts of a response; the last turn is empty when an observation is the end."""
    ids = completion.token_ids
    transcript = tokenizer.decode_response(ids)
    if not completion.sampled:
        return ResponseTexts(transcript, (transcript,), transcript)
    runs = groupby(zip(ids, completion.sampled, strict=True), key=itemgetter(1))
    turns = [tokenizer.decode_response([i for i, _ in run]) for own, run in runs if own]
    last = turns[-1] if completion.sampled[-1] else ""
    return ResponseTexts(last, tuple(turns), transcript)


def rollout_batch(groups: Sequence[SampledGroup], tokenizer: ChatTokenizer) -> RolloutBatch:
    rows = [(g, group, c) for g, group in enumerate(groups) for c in group.completions]
    texts = [response_texts(c, tokenizer) for _, _, c in rows]
    return response_batch(
        prompts=[group.prompt.prompt_ids for _, group, _ in rows],
        responses=[c.token_ids for _, _, c in rows],
        group_ids=[g for g, _, _ in rows],
        pad_token_id=tokenizer.pad_token_id,
        problems=[group.prompt.problem for _, group, _ in rows],
        texts=[text.last for text in texts],
        transcripts=[text.transcript for text in texts],
        turns=[text.turns for text in texts],
        response_logprobs=[c.logprobs for _, _, c in rows],
        policy_versions=[c.policy_version for _, _, c in rows],
        truncated=[c.finish_reason == "length" for _, _, c in rows],
        sampled=[c.sampled for _, _, c in rows],
        node_ids=[c.node_ids for _, _, c in rows],
    )
