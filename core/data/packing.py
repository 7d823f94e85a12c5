"""Ragged token lists to the padded tensors of a `RolloutBatch`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import SampledGroup
from posttrain.core.data.tokenization import ChatTokenizer
from posttrain.core.types import Problem


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
) -> RolloutBatch:
    """A batch of one row per response. Rows of one group share a prompt.

    Log-probs that nobody gave are NaN, so that nothing can take them for real.
    """
    num_rows = len(responses)
    prompt_ids, prompt_mask = pad_left(prompts, pad_token_id)
    response_ids, response_mask = pad_right(responses, pad_token_id)
    logprobs = torch.full(response_ids.shape, float("nan"))
    if response_logprobs is not None:
        logprobs = torch.zeros(response_ids.shape)
        for row, values in enumerate(response_logprobs):
            logprobs[row, : len(values)] = torch.tensor(values, dtype=torch.float32)
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
    )
    batch.validate()
    return batch


def rollout_batch(groups: Sequence[SampledGroup], tokenizer: ChatTokenizer) -> RolloutBatch:
    """A sampler's groups as one batch, group by group."""
    rows = [(g, group, c) for g, group in enumerate(groups) for c in group.completions]
    return response_batch(
        prompts=[group.prompt.prompt_ids for _, group, _ in rows],
        responses=[c.token_ids for _, _, c in rows],
        group_ids=[g for g, _, _ in rows],
        pad_token_id=tokenizer.pad_token_id,
        problems=[group.prompt.problem for _, group, _ in rows],
        texts=[tokenizer.decode_response(c.token_ids) for _, _, c in rows],
        response_logprobs=[c.logprobs for _, _, c in rows],
        policy_versions=[c.policy_version for _, _, c in rows],
        truncated=[c.finish_reason == "length" for _, _, c in rows],
    )
