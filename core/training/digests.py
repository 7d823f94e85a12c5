"""Short digests of tensors, cheap enough to be taken after every optimizer step.

Of each weight one block of at most `BLOCK` elements is read, another one each step, so the cost
does not grow with the model. A step that goes another way moves all of a tensor, by gradients or by
moments, so a block shows it. All of it is done on one core, by numpy: hundreds of small operations
would have torch's threads wait for one another, for seconds on a busy machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Octets = NDArray[np.uint8]
BLOCK = 16_384
_COLUMNS = 128  # 64-bit words that a block is folded into before it is hashed


def tensor_digest(tensor: Tensor) -> str:
    """16 hexadecimal digits over all bits of a tensor, its shape and type; the same everywhere."""
    return _hash(_octets(tensor.detach().reshape(-1)).cpu().numpy(), tensor)


@dataclass(frozen=True, slots=True)
class Block:
    """The block that a step's digest reads, of a tensor of `shape` that is not here as a whole."""

    values: Tensor
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype


def block_bounds(numel: int, step: int) -> tuple[int, int]:
    """Where the block of `step` begins and ends among the elements of a tensor."""
    start = step % max(1, -(-numel // BLOCK)) * BLOCK
    return start, min(start + BLOCK, numel)


def block_digests(tensors: Mapping[str, Tensor | Block], step: int) -> dict[str, str]:
    """A digest by name of one block of each tensor: which one follows from `step`."""
    blocks = [_octets(_block(tensor, step)) for tensor in tensors.values()]
    if any(block.device.type != "cpu" for block in blocks):  # brought over in one piece
        sizes = [block.numel() for block in blocks]
        blocks = list(torch.split(torch.cat(blocks).cpu(), sizes))
    return {
        name: _hash(block.numpy(), tensor)
        for (name, tensor), block in zip(tensors.items(), blocks, strict=True)
    }


def _block(tensor: Tensor | Block, step: int) -> Tensor:
    if isinstance(tensor, Block):
        return tensor.values
    start, stop = block_bounds(tensor.numel(), step)
    return tensor.detach().reshape(-1)[start:stop]


def _octets(flat: Tensor) -> Tensor:
    return flat.contiguous().view(torch.uint8)


def _hash(octets: Octets, tensor: Tensor | Block) -> str:
    """Of the sums of the bits as 64-bit words in columns, which no order of adding changes."""
    row = 8 * _COLUMNS
    cut = len(octets) // row * row
    words: NDArray[Any] = np.frombuffer(octets[:cut].data, dtype=np.int64).reshape(-1, _COLUMNS)
    reported = hashlib.blake2b(f"{tuple(tensor.shape)} {tensor.dtype}".encode(), digest_size=8)
    reported.update(words.sum(axis=0).tobytes())
    reported.update(octets[cut:].tobytes())
    return reported.hexdigest()
