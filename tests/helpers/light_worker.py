"""Ranks that start fast: a small model in plain torch, each rank with all weights.

The gradient of a step is the sum over all rows, of which each rank has its share.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from posttrain.core.cluster.group import Methods
from posttrain.core.errors import DataError

WIDTH, ROWS = 64, 32


class Model:
    """Two layers and their momentum; float64, so that another order of sums is far below 1e-9."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self.weights = [
            torch.randn(WIDTH, WIDTH, generator=draw, dtype=torch.float64) / WIDTH**0.5
            for _ in range(2)
        ]
        self.momentum = [torch.zeros_like(weight) for weight in self.weights]
        self.step = 0

    def update(self, rank: int, size: int) -> float:
        """One step on the rows of `step`; the loss over all rows."""
        draw = torch.Generator().manual_seed(1000 + self.step)
        rows = torch.randn(ROWS, WIDTH, generator=draw, dtype=torch.float64)[rank::size]
        leaves = [weight.requires_grad_() for weight in self.weights]
        loss = (torch.tanh(rows @ leaves[0]) @ leaves[1] - rows).square().sum() / ROWS
        found = [loss.detach(), *torch.autograd.grad(loss, leaves)]
        for one in found:
            dist.all_reduce(one)
        for weight, moment, grad in zip(self.weights, self.momentum, found[1:], strict=True):
            weight.requires_grad_(False)
            moment.mul_(0.9).add_(grad)
            weight.sub_(0.05 * moment)
        self.step += 1
        return float(found[0])

    def tensors(self) -> dict[str, Tensor]:
        named = {"weight": self.weights, "momentum": self.momentum}
        return {f"{name}.{i}": t for name, ts in named.items() for i, t in enumerate(ts)}


def build(setup: object) -> Methods:
    """Methods for tests of what ends ranks."""
    torch.set_num_threads(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    model = Model()

    def write(path: Path) -> None:
        if rank == 0:  # whole or not at all
            partial = path.with_suffix(".partial")
            save_file(model.tensors(), partial, {"step": str(model.step)})
            partial.replace(path)

    def read(path: Path, step: int) -> None:
        for name, tensor in load_file(path).items():
            model.tensors()[name].copy_(tensor)
        model.step = step

    def fail(who: int) -> None:
        if who == rank:
            raise DataError("row 3 does not exist")

    def die(who: int) -> None:
        if who == rank:
            print(f"rank {rank} says no more", flush=True)
            os._exit(9)
        dist.all_reduce(torch.ones(1))  # waits for the one that is gone

    def wait(seconds: float) -> None:
        time.sleep(seconds)
        dist.all_reduce(torch.ones(1))

    return {
        "update": lambda: model.update(rank, size),
        "weights": lambda: {name: t.clone() for name, t in model.tensors().items()},
        "take": lambda given: None,
        "write": write,
        "read": read,
        "fail": fail,
        "die": die,
        "wait": wait,
        "pid": os.getpid,
    }
