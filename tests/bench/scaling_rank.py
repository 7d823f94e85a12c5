"""A rank of `tests/bench/scaling.py`: a sharded learner that updates when it is reported to."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh

from posttrain.core.batch import RolloutBatch
from posttrain.core.cluster.group import Methods
from posttrain.core.models.device import ModelRuntime
from posttrain.core.models.sharded import shard
from posttrain.core.runtime.heap import keep_freed_memory
from posttrain.core.training.ranks import ProcessGroup
from tests.bench.learner import make_learner


def build(setup: tuple[Path, str]) -> Methods:
    """The learner on the model in that folder, computing in that precision."""
    folder, dtype = setup
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    keep_freed_memory()
    ranks = ProcessGroup()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else kind
    runtime = ModelRuntime(torch.device(device), torch.float32, "stream")
    mesh = init_device_mesh(kind, (ranks.size,))
    learner = make_learner(
        folder, runtime, 32, ranks, lambda model: shard(model, mesh, getattr(torch, dtype))
    )

    def update(batch: RolloutBatch) -> None:
        learner.update(batch, 0, 0.0)

    return {"update": update}
