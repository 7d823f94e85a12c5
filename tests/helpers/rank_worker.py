"""What the ranks of a test run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from posttrain.core.cluster.group import Methods
from posttrain.core.models.sharded import mesh_of, shard, whole
from posttrain.core.training.digests import Block
from posttrain.core.training.finite import NonFinite
from posttrain.core.training.ranks import ProcessGroup
from posttrain.core.training.step_record import gather_blocks
from tests.helpers.speed import Options, gradients, speed_batch, speed_learner, speed_model


def build(setup: int | None) -> Methods:
    """Methods for `tests/contract/test_ranks*.py`; `setup` is the size of a copy of the weights."""
    torch.set_num_threads(1)
    ranks = ProcessGroup()
    mesh = mesh_of("cpu", ranks.size, setup)
    kept: dict[str, Any] = {}

    def gradient(family: str, options: Options) -> dict[str, Tensor]:
        return gradients(family, options, ranks, mesh)

    def start(family: str, options: Options) -> None:
        model = speed_model(family, options)
        shard(model, mesh, torch.float32)
        kept["learner"] = speed_learner(model, options, ranks)

    def update(step: int) -> dict[str, float]:
        metrics: dict[str, float] = kept["learner"].update(speed_batch(), step, 0.0).metrics
        return metrics

    def update_spoiled(row: int) -> tuple[dict[str, float], list[NonFinite]]:
        """An update on a batch with a row, which one rank computes, that is not finite."""
        batch = speed_batch()
        advantages = batch.column("advantages").clone()
        advantages[row] = float("nan")
        learner = kept["learner"]
        metrics = learner.update(batch.with_columns(advantages=advantages), 0, 0.0).metrics
        return metrics, learner.optimizer.take_non_finite()

    def weights() -> dict[str, Tensor]:
        return {n: whole(p.detach()) for n, p in kept["learner"].model.named_parameters()}

    def blocks(step: int) -> dict[str, Block]:
        return gather_blocks(kept["learner"].optimizer.weights(), step, ranks)

    def blocks_of(tensor: Tensor, step: int) -> dict[str, Block]:
        parts = [Shard(0)] if mesh.ndim == 1 else [Replicate(), Shard(0)]
        cut = distribute_tensor(tensor, mesh, parts)
        return gather_blocks({"cut": cut, "whole": tensor}, step, ranks)

    return {
        "gradient": gradient,
        "start": start,
        "update": update,
        "update_spoiled": update_spoiled,
        "weights": weights,
        "blocks": blocks,
        "blocks_of": blocks_of,
        "write": lambda folder: kept["learner"].optimizer.write(folder),
        "read": lambda folder, count: kept["learner"].optimizer.read(folder, count),
    }
