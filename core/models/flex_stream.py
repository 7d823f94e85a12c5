"""Attention over a stream by FlexAttention, on CUDA: one fused kernel, no grids, no copies.

A token sees those of its own history: of its prompt and its response, up to itself. Blocks of
queries and keys that see nothing of each other are skipped.
Axes: S tokens, H heads, K key heads, D head size.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from posttrain.core.models.compiling import allow_ways

if TYPE_CHECKING:
    from posttrain.core.models.stream_attention import StreamLayout

logger = logging.getLogger(__name__)

_HAS_TRITON = importlib.util.find_spec("triton") is not None
_LEAST_HEAD = 16
_BLOCK = 128
# Queries whose view of all keys is made at a time.
_ROWS = 32 * _BLOCK
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def why_no_flex(query: Tensor) -> str | None:
    """Why FlexAttention's kernel cannot take such queries; None if it can."""
    if not query.is_cuda:
        return "it has no backward pass on a CPU"
    if not _HAS_TRITON:
        return "it needs the package triton"
    if query.dtype not in _DTYPES or query.shape[-1] < _LEAST_HEAD:
        return f"it takes no heads of {query.shape[-1]} in {query.dtype}"
    # Compiled layers have none either, and the question cannot be compiled.
    if torch.compiler.is_compiling():
        return None
    if forward_ad.unpack_dual(query).tangent is not None:  # type: ignore[no-untyped-call]
        return "it has no forward-mode derivative"
    return None


@functools.cache
def say_once(reason: str | None) -> None:
    how = "FlexAttention" if reason is None else f"grids and SDPA, not FlexAttention: {reason}"
    logger.info("the stream's attention is by %s", how)


def stream_mask(layout: StreamLayout) -> MaskMod:
    """Whether a query sees a key, by their places in the stream.

    One number a query and two a key: the kernel loads them beside the keys, and tables of what is
    in whose history take more shared memory than a GPU has at heads of 128.
    """
    numbers, last = layout.numbers, layout.last

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        asking = numbers[query]
        return (numbers[key] <= asking) & (asking <= last[key])

    return sees


def prepared(layout: StreamLayout) -> StreamLayout:
    """`layout` with what the kernel needs on CUDA; before the layers, which may be compiled."""
    if layout.back.is_cuda and _HAS_TRITON:
        block_mask(layout)
    return layout


def block_mask(layout: StreamLayout) -> BlockMask:
    """The mask by blocks of 128 tokens, made once for all layers."""
    if "block_mask" not in layout.made:
        partial, whole = _seen_blocks(layout.numbers, layout.last)
        count = len(layout.back)
        layout.made["block_mask"] = BlockMask.from_kv_blocks(
            *_listed(partial),
            *_listed(whole),
            BLOCK_SIZE=_BLOCK,
            mask_mod=stream_mask(layout),
            seq_lengths=(count, count),
        )
    found: BlockMask = layout.made["block_mask"]
    return found


def _seen_blocks(numbers: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Which blocks of keys a block of queries sees in part, and which all of: [n, n] each."""
    room = -len(numbers) % _BLOCK
    # Tokens that are not there see none, and nobody sees them.
    asking = functional.pad(numbers, (0, room), value=-1)
    ends = functional.pad(last, (0, room), value=-2)
    blocks = len(asking) // _BLOCK
    some, every = [], []
    for rows in torch.split(asking, _ROWS):
        sees = (asking <= rows[:, None]) & (rows[:, None] <= ends)
        by_block = sees.view(-1, _BLOCK, len(asking))
        some.append(by_block.any(dim=1).view(-1, blocks, _BLOCK).any(dim=2))
        every.append(by_block.all(dim=1).view(-1, blocks, _BLOCK).all(dim=2))
    whole = torch.cat(every)
    return torch.cat(some) & ~whole, whole


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many of [n, n] are true in each row, and their columns first: [1, 1, n (, n)]."""
    columns = blocks.int().argsort(dim=1, descending=True, stable=True)
    return blocks.sum(dim=1, dtype=torch.int32)[None, None], columns.int()[None, None]


@functools.cache
def _kernel() -> Any:  # Any: what torch.compile returns
    """FlexAttention compiled: only then is it one kernel. Shapes differ between micro-batches."""
    allow_ways()
    return torch.compile(flex_attention)


def flex_stream(
    query: Tensor, key: Tensor, value: Tensor, layout: StreamLayout, scaling: float
) -> Tensor:
    """Attention [1, S, H, D] of `query` [1, H, S, D] over `key`, `value` [1, K, S, D]."""
    shared = query.shape[1] // key.shape[1]
    if shared > 1 and torch.is_grad_enabled() and key.requires_grad:
        # The backward pass works on all queries of a block of keys one after the other: those of
        # a prompt are of every response, and of `shared` heads (decision 23).
        key, value = (x.repeat_interleave(shared, dim=1) for x in (key, value))
    # In a compiled layer it is compiled with the rest.
    attend = _kernel() if query.is_cuda and not torch.compiler.is_compiling() else flex_attention
    out: Tensor = attend(
        query,
        key,
        value,
        block_mask=block_mask(layout),
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2).contiguous()
