"""Attention over one stream of tokens: prompts, then responses that share them.

A token sees those of its own history: of its prompt and its response, up to itself. Blocks of
queries and keys that see nothing of each other are skipped.

Every other layer of a model runs on the stream [1, S] as it is, so nothing is padded, and tokens
that rows begin with alike are computed once for all of them. Tokens are laid out in grids for the
products of queries and keys alone; the responses' queries meet the prompt's keys as one product,
without a copy for each.
Axes: S tokens, P prompts, L longest prompt, G most responses of a prompt, R longest response, H
heads, K key heads, D head size.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from posttrain.core.models.decoding import grouped_attention, use_attention
from posttrain.core.models.layers import allow_ways
from posttrain.core.models.linear import product

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

    One number a query and two a key: the kernel loads them next to the keys, and tables of what is
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


STREAM = "posttrain_stream"
# Prompt tokens from which SDPA's causal kernel beats plain products on a CPU.
LONG_PROMPT = 512
# Queries x keys of a response from which the memory of their products is too much.
LONG_RESPONSE = 512 * 512
KeysValues = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Repeats:
    """The tokens [U] that several places of the grids hold, these places, and which each holds."""

    tokens: Tensor  # [U], in the stream
    places: Tensor  # [D]
    which: Tensor  # [D], in U

    def to(self, device: torch.device) -> Repeats:
        return Repeats(self.tokens.to(device), self.places.to(device), self.which.to(device))


@dataclass(frozen=True, slots=True)
class StreamLayout:
    """Where tokens of the stream lie in two grids laid one after the other, prompts and responses.

    `places` [P x L + P x G x R] is the token at each place, 0 where there is none; `back` [S] is
    the first place of each token, whose attention is the token's; the others are `repeats`. Tokens
    stand at the front of a row, so that causality hides what follows. Histories make a tree:
    token k is in the history of q where numbers[k] <= numbers[q] <= last[k].
    """

    shape: tuple[int, int, int, int]  # P, L, G, R
    places: Tensor
    back: Tensor
    repeats: Repeats | None
    prompt_lengths: Tensor  # [P]
    longest: int  # tokens of the longest prompt and response together
    numbers: Tensor  # [S], depth first
    last: Tensor  # [S], the largest number of a token whose history has this one
    made: dict[str, Any] = field(default_factory=dict, compare=False)
    """What attention made of the layout for all layers (Any: a mask of FlexAttention's)."""

    def to(self, device: torch.device) -> StreamLayout:
        return StreamLayout(
            self.shape,
            self.places.to(device),
            self.back.to(device),
            None if self.repeats is None else self.repeats.to(device),
            self.prompt_lengths.to(device),
            self.longest,
            self.numbers.to(device),
            self.last.to(device),
        )


class _ToGrids(torch.autograd.Function):
    """Stream [S, ...] to grids [places, ...]; empty places, which nobody sees, get no gradient.

    Nor do queries at other places than a token's first; keys and values sum those of `repeats`.
    """

    @staticmethod
    def forward(
        ctx: Any, stream: Tensor, places: Tensor, back: Tensor, repeats: Repeats | None
    ) -> Tensor:
        ctx.save_for_backward(back)
        ctx.save_for_forward(places)
        ctx.repeats = repeats
        return stream.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        found = grad.index_select(0, back)
        repeats: Repeats | None = ctx.repeats
        if repeats is not None:
            wide = torch.promote_types(grad.dtype, torch.float32)
            parts = grad.index_select(0, repeats.places).flatten(1).to(wide)
            sums = parts.new_zeros(len(repeats.tokens), parts.shape[1])
            # Six times as fast on a CPU as `index_add_`, which adds row by row.
            sums.scatter_add_(0, repeats.which[:, None].expand_as(parts), parts)
            found[repeats.tokens] = sums.view(-1, *grad.shape[1:]).to(grad.dtype)
        return found, None, None, None

    @staticmethod
    def jvp(ctx: Any, stream: Tensor, places: None, back: None, repeats: None) -> Tensor:
        (places_of,) = ctx.saved_tensors
        return stream.index_select(0, places_of)


class _ToStream(torch.autograd.Function):
    """Grids [places, ...] to stream [S, ...]; what stands at places not in `back` is dropped."""

    @staticmethod
    def forward(ctx: Any, grids: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        ctx.save_for_forward(back)
        ctx.num_places = len(grids)
        return grids.index_select(0, back)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (back,) = ctx.saved_tensors
        grids = grad.new_zeros((ctx.num_places, *grad.shape[1:]))
        grids[back] = grad
        return grids, None

    @staticmethod
    def jvp(ctx: Any, grids: Tensor, back: None) -> Tensor:
        (back_of,) = ctx.saved_tensors
        return grids.index_select(0, back_of)


def stream_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    stream_layout: StreamLayout | None = None,
    **kwargs: Any,  # Any: transformers passes what each model family has
) -> tuple[Tensor, None]:
    """Attention [1, S, H, D] of `query` [1, H, S, D] over `key`, `value` [1, K, S, D].

    Without a layout it is `grouped_attention` under `attention_mask`; on CUDA it is FlexAttention
    where that can be.
    """
    if stream_layout is None:
        return grouped_attention(module, query, key, value, attention_mask, scaling, **kwargs)
    reason = why_no_flex(query)
    if query.is_cuda and not torch.compiler.is_compiling():
        say_once(reason)
    if reason is None:
        return flex_stream(query, key, value, stream_layout, scaling), None
    return _by_grids(query, key, value, scaling, stream_layout), None


# Each shape of the grids would be compiled again.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _by_grids(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, stream_layout: StreamLayout
) -> Tensor:
    prompts, longest, rows, length = stream_layout.shape
    edge = prompts * longest
    places, back, repeats = stream_layout.places, stream_layout.back, stream_layout.repeats
    q, k, v = (
        _ToGrids.apply(x[0].transpose(0, 1), places, back, again)  # type: ignore[no-untyped-call]
        for x, again in ((query, None), (key, repeats), (value, repeats))
    )
    groups, heads, size = key.shape[1], query.shape[1], query.shape[3]
    shared = heads // groups
    q_prompt = q[:edge].view(prompts, longest, groups, shared, size).permute(0, 2, 3, 1, 4)
    k_prompt, v_prompt = (
        x[:edge].view(prompts, longest, groups, -1).transpose(1, 2) for x in (k, v)
    )
    out = _within_prompts(q_prompt, k_prompt, v_prompt, scaling)
    parts = [out.permute(0, 3, 1, 2, 4).reshape(edge, heads, -1)]
    if rows * length:
        shape = (prompts, rows, length, groups)
        q_own = q[edge:].view(*shape, shared, size).permute(0, 3, 1, 4, 2, 5)
        k_own, v_own = (x[edge:].view(*shape, -1).permute(0, 3, 1, 2, 4) for x in (k, v))
        lengths = stream_layout.prompt_lengths
        out = _responses(q_own, (k_prompt, v_prompt), (k_own, v_own), lengths, scaling)
        parts.append(out.permute(0, 2, 4, 1, 3, 5).reshape(-1, heads, value.shape[3]))
    stream: Tensor = _ToStream.apply(torch.cat(parts), back)  # type: ignore[no-untyped-call]
    return stream.unsqueeze(0)


def _within_prompts(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """[P, K, H/K, L, D] of queries of that shape over keys and values [P, K, L, D].

    Here and below heads of values may have another size than those of queries and keys.
    """
    prompts, groups, shared, length, size = query.shape
    found = (*query.shape[:-1], value.shape[-1])
    if length > LONG_PROMPT:
        return functional.scaled_dot_product_attention(
            query.reshape(prompts, groups * shared, length, size),
            key,
            value,
            is_causal=True,
            scale=scaling,
            enable_gqa=shared > 1,
        ).view(found)
    stacked = query.reshape(prompts, groups, shared * length, size)
    scores = product(stacked, key.transpose(2, 3))
    by_query = scores.view(prompts, groups, shared, length, length)
    weights = _softmax(by_query, _later(length, query.device), scaling)
    return product(weights.view(scores.shape), value).view(found)


def _responses(
    query: Tensor, prompt: KeysValues, own: KeysValues, prompt_lengths: Tensor, scaling: float
) -> Tensor:
    """[P, K, G, H/K, R, D] of queries of that shape over their prompt and what came before.

    Keys and values: [P, K, L, D] of `prompt` and [P, K, G, R, D] of their `own`.
    """
    prompts, length, longest = query.shape[0], query.shape[4], prompt[0].shape[2]
    beyond = torch.arange(longest, device=query.device) >= prompt_lengths[:, None]  # [P, L]
    of_prompt = beyond[:, None, :].expand(prompts, length, longest)
    of_own = _later(length, query.device).expand(prompts, length, length)
    hidden = torch.cat([of_prompt, of_own], dim=-1)
    if query.is_cuda or length * (longest + length) > LONG_RESPONSE:
        return _with_copied_prompts(query, prompt, own, hidden, scaling)
    return _with_shared_prompts(query, prompt, own, hidden, scaling)


def _with_shared_prompts(
    query: Tensor, prompt: KeysValues, own: KeysValues, hidden: Tensor, scaling: float
) -> Tensor:
    """`_responses` by plain products; `hidden` [P, R, L + R] is what a query does not see."""
    prompts, groups, rows, shared, length, size = query.shape
    longest = prompt[0].shape[2]
    query = query.contiguous()
    with_prompt = query.view(prompts, groups, rows * shared * length, size)
    with_own = query.view(prompts, groups, rows, shared * length, size)
    grid = (prompts, groups, rows, shared, length)
    to_prompt = product(with_prompt, prompt[0].transpose(2, 3)).view(*grid, longest)
    to_own = product(with_own, own[0].transpose(3, 4)).view(*grid, length)
    scores = torch.cat([to_prompt, to_own], dim=-1)
    weights = _softmax(scores, hidden[:, None, None, None], scaling)
    to_prompt = weights[..., :longest].reshape(prompts, groups, rows * shared * length, longest)
    to_own = weights[..., longest:].reshape(prompts, groups, rows, shared * length, length)
    found = (*query.shape[:-1], own[1].shape[-1])
    return product(to_prompt, prompt[1]).view(found) + product(to_own, own[1]).view(found)


def _with_copied_prompts(
    query: Tensor, prompt: KeysValues, own: KeysValues, hidden: Tensor, scaling: float
) -> Tensor:
    """`_responses` by SDPA, which holds no scores: keys and values are copied to each response."""
    prompts, groups, rows, shared, length, size = query.shape
    keys, values = (
        torch.cat([p[:, None].expand(-1, rows, -1, -1, -1), o.transpose(1, 2)], dim=3).flatten(0, 1)
        for p, o in zip(prompt, own, strict=True)
    )
    seen = (~hidden)[:, None].expand(-1, rows, -1, -1).flatten(0, 1).unsqueeze(1)
    by_row = query.transpose(1, 2).reshape(prompts * rows, groups * shared, length, size)
    out = functional.scaled_dot_product_attention(
        by_row, keys, values, attn_mask=seen, scale=scaling, enable_gqa=shared > 1
    )
    return out.view(prompts, rows, groups, shared, length, -1).transpose(1, 2)


def _later(length: int, device: torch.device) -> Tensor:
    """True [length, length] where the key comes after the query."""
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)


def _softmax(scores: Tensor, hidden: Tensor, scaling: float) -> Tensor:
    """Weights over the last axis, 0 where `hidden`, made in at least float32."""
    wide = scores if scores.dtype == torch.float64 else scores.float()
    # Added, not filled in: filling has a pass of its own, and one more in the backward pass.
    bias = torch.zeros(hidden.shape, dtype=wide.dtype, device=wide.device)
    bias.masked_fill_(hidden, float("-inf"))
    return torch.softmax(torch.add(bias, wide, alpha=scaling), dim=-1).to(scores.dtype)


def use_stream_attention(model: Any) -> None:  # Any: transformers' model classes are not typed
    use_attention(model, STREAM, stream_attention)
