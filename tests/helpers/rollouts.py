"""Rollout batches of a tiny model, and comparisons of gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from posttrain.core.batch import RolloutBatch
from posttrain.core.data.tokens import response_batch
from posttrain.core.types import Completion, Problem

PROBLEM = Problem("k", "p", "a", "w")


def load_tiny(folder: Path, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """The causal language model in `folder`.

    Llama computes norms and rotary angles in float32 whatever its weights are, so equalities
    through a float64 model hold to float32.
    """
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa"
    )
    return model.eval()


def batch_of_groups(
    prompts: Sequence[Sequence[int]], groups: Sequence[Sequence[Completion]]
) -> RolloutBatch:
    """A row for each completion that an engine gave, in the groups of their prompts."""
    rows = [(g, c) for g, group in enumerate(groups) for c in group]
    return response_batch(
        prompts=[prompts[g] for g, _ in rows],
        responses=[c.token_ids for _, c in rows],
        group_ids=[g for g, _ in rows],
        pad_token_id=0,
        problems=(),
        response_logprobs=[c.logprobs for _, c in rows],
        policy_versions=[c.policy_version for _, c in rows],
    )


def ragged_batch(prompt_lengths: Sequence[int], group_size: int, seed: int = 0) -> RolloutBatch:
    """Ragged prompts and responses; advantages of both signs; row 1 takes no loss."""
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> list[int]:
        return torch.randint(4, 90, (count,), generator=generator).tolist()

    prompts = [ids(length) for length in prompt_lengths]
    rows = [(g, prompt) for g, prompt in enumerate(prompts) for _ in range(group_size)]
    responses = [ids(1 + (i * 3) % 7) for i in range(len(rows))]
    batch = response_batch(
        prompts=[prompt for _, prompt in rows],
        responses=responses,
        group_ids=[g for g, _ in rows],
        pad_token_id=0,
        problems=[PROBLEM] * len(rows),
        response_logprobs=[[-1.0] * len(r) for r in responses],
    )
    advantages = torch.randn(batch.response_ids.shape, generator=generator, dtype=torch.float64)
    mask = batch.mask.clone()
    mask[1:2] = 0
    return batch.with_columns(advantages=advantages * mask, mask=mask)


def sequence(batch: RolloutBatch, row: int) -> tuple[Tensor, Tensor]:
    """Prompt ids and response ids of one row, without padding."""
    prompt = batch.prompt_ids[row][batch.prompt_mask[row].bool()]
    return prompt, batch.response_ids[row][batch.response_mask[row].bool()]


def gradient_of(module: torch.nn.Module) -> list[Tensor]:
    """Copies of the gradients that `module`'s parameters hold."""
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def assert_same_gradient(ours: list[Tensor], plain: list[Tensor], tolerance: float = 1e-6) -> None:
    """Equal to `tolerance` of the whole gradient's norm."""
    difference = sum(float((a - b).square().sum()) for a, b in zip(ours, plain, strict=True))
    norm = sum(float(b.square().sum()) for b in plain)
    assert norm > 0
    assert math.sqrt(difference) <= tolerance * math.sqrt(norm)
