"""Blocks of weights that lie in pieces on several ranks, put together for a step's record.

Only what the record reads is sent: 64 KiB of each weight, not the model.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from posttrain.core.training.digests import Block, block_bounds
from posttrain.core.training.ranks import Ranks


def gather_blocks(tensors: Mapping[str, Tensor], step: int, ranks: Ranks) -> dict[str, Block]:
    """The block of each tensor that the digest of `step` reads, on every rank; all must ask."""
    parts = [_own_part(tensor, step, ranks) for tensor in tensors.values()]
    # Each element is on one rank and 0 on the others, and float32 holds every trained type exactly.
    summed = ranks.add(torch.cat([part.float() for part in parts])) if parts else torch.empty(0)
    blocks = torch.split(summed, [part.numel() for part in parts])
    return {
        name: Block(block.to(tensor.dtype), tuple(tensor.shape))
        for (name, tensor), block in zip(tensors.items(), blocks, strict=True)
    }


def _own_part(tensor: Tensor, step: int, ranks: Ranks) -> Tensor:
    """The block with 0 where another rank has it."""
    start, stop = block_bounds(tensor.numel(), step)
    here, offset = tensor.detach(), 0
    if isinstance(here, DTensor):
        piece, rows = here.to_local(), -(-here.shape[0] // ranks.size)
        first = min(ranks.rank * rows, here.shape[0])
        if piece.shape[0] != min(rows, here.shape[0] - first):
            raise ValueError(f"a weight of {tuple(tensor.shape)} is not cut evenly over ranks")
        here, offset = piece, first * (tensor.numel() // tensor.shape[0])
    elif ranks.rank > 0:
        here = here.new_empty(0)  # rank 0 has all of it as well
    flat = here.reshape(-1).cpu()
    part = flat.new_zeros(stop - start)
    low, high = max(start, offset), min(stop, offset + flat.numel())
    if low < high:
        part[low - start : high - start] = flat[low - offset : high - offset]
    return part
