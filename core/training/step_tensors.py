"""Which tensors of a step are recorded, in the order in which the step computes them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.data.preference import LabelledAnswer, Pair
from posttrain.core.training.digests import Block
from posttrain.core.training.optim import StoredOptimizer

POLICY, CRITIC = "policy", "critic"
_COLUMNS = (
    "prompt_ids",
    "response_ids",
    "response_mask",
    "rollout_logprobs",
    "policy_version",
    "rewards",
    "mask",
    "advantages",
)


def rollout_tensors(batch: RolloutBatch | None) -> dict[str, Tensor]:
    """Of a rollout: what was sampled, what it was worth, what was made of that."""
    if batch is None:
        return {}
    return {name: batch.column(name) for name in _COLUMNS if name in batch.columns()}


def example_tensors(batch: RolloutBatch) -> dict[str, Tensor]:
    return {name: batch.column(name) for name in ("prompt_ids", "response_ids", "mask")}


def preference_tensors(rows: Sequence[Pair | LabelledAnswer]) -> dict[str, Tensor]:
    """Of pairs or labelled answers: all their tokens in a row, and each row's number of them."""
    ids = [list(chain(*_ids(row))) for row in rows]
    return {
        "token_ids": torch.tensor(list(chain(*ids)), dtype=torch.int64),
        "lengths": torch.tensor([len(row) for row in ids], dtype=torch.int64),
    }


def _ids(row: Pair | LabelledAnswer) -> list[tuple[int, ...]]:
    values = (getattr(row, name) for name in type(row).__dataclass_fields__)
    return [value for value in values if isinstance(value, tuple)]


def weight_tensors(
    policy: StoredOptimizer, critic: StoredOptimizer | None, step: int
) -> dict[str, Tensor | Block]:
    """Trained weights by name, those of the critic after those of the policy."""
    found = {f"{POLICY}/{name}": tensor for name, tensor in policy.weights(step).items()}
    if critic is not None:
        found |= {f"{CRITIC}/{name}": tensor for name, tensor in critic.weights(step).items()}
    return found
