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
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

if TYPE_CHECKING:
    from posttrain.core.models.stream_attention import StreamLayout

logger = logging.getLogger(__name__)

_LEAST_HEAD = 16
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def why_no_flex(query: Tensor) -> str | None:
    """Why FlexAttention's kernel cannot take such queries; None if it can."""
    if not query.is_cuda:
        return "it has no backward pass on a CPU"
    if importlib.util.find_spec("triton") is None:
        return "it needs the package triton"
    if query.dtype not in _DTYPES or query.shape[-1] < _LEAST_HEAD:
        return f"it takes no heads of {query.shape[-1]} in {query.dtype}"
    if forward_ad.unpack_dual(query).tangent is not None:  # type: ignore[no-untyped-call]
        return "it has no forward-mode derivative"
    return None


@functools.cache
def say_once(reason: str | None) -> None:
    """Log which attention a GPU gets; a reason is said once."""
    how = "FlexAttention" if reason is None else f"grids and SDPA, not FlexAttention: {reason}"
    logger.info("the stream's attention is by %s", how)


def histories(layout: StreamLayout) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [P + P x G, L + R] of tokens, and each token's [S] row and column: those of its place.

    A row is a prompt, or a prompt and a response; -1 stands where a prompt has no response.
    """
    prompts, longest, rows, length = layout.shape
    edge = prompts * longest
    own = (layout.back - edge).clamp(min=0)
    is_prompt = layout.back < edge
    row = torch.where(is_prompt, layout.back // longest, prompts + own // max(1, length))
    column = torch.where(is_prompt, layout.back % longest, longest + own % max(1, length))
    of_prompts = layout.places[:edge].view(prompts, longest)
    of_own = layout.places[edge:].view(prompts * rows, length)
    alone = torch.cat([of_prompts, of_own.new_full((prompts, length), -1)], dim=1)
    answered = torch.cat([of_prompts.repeat_interleave(rows, 0), of_own], dim=1)
    return torch.cat([alone, answered]), row, column


def stream_mask(layout: StreamLayout) -> MaskMod:
    """Whether a query sees a key, by their places in the stream."""
    tokens, rows, columns = histories(layout)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        before = columns[key] <= columns[query]
        return before & (tokens[rows[query], columns[key]] == key)

    return sees


def block_mask(layout: StreamLayout) -> BlockMask:
    """The mask by blocks of 128 tokens, made once for all layers.

    Making it takes S x S booleans for a moment: 1 GB for a stream of 32,000 tokens.
    """
    if "block_mask" not in layout.made:
        count, device = len(layout.back), layout.back.device
        layout.made["block_mask"] = create_block_mask(
            stream_mask(layout), None, None, count, count, device=device
        )
    found: BlockMask = layout.made["block_mask"]
    return found


@functools.cache
def _kernel() -> Any:  # Any: what torch.compile returns
    """FlexAttention compiled: only then is it one kernel. Shapes differ between micro-batches."""
    return torch.compile(flex_attention)


def flex_stream(
    query: Tensor, key: Tensor, value: Tensor, layout: StreamLayout, scaling: float
) -> Tensor:
    """Attention [1, S, H, D] of `query` [1, H, S, D] over `key`, `value` [1, K, S, D]."""
    attend = _kernel() if query.is_cuda else flex_attention
    out: Tensor = attend(
        query,
        key,
        value,
        block_mask=block_mask(layout),
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2).contiguous()
