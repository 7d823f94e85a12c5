"""Token log-probs and entropy from hidden states, without all logits in memory.

Plain, each operation reads and writes the block; compiled, nothing as large as the block is kept
but its gradient. n rows, V vocabulary.

Several tokens may follow one state, and are then looked up in one row of logits.
Axes: M rows of logits, N tokens, K rows of logits known, V vocabulary, n and m of a block.

N tokens, M states that they follow, H hidden size, V vocabulary. The projection runs in chunks of
rows, and the backward pass makes each chunk's logits again, but for the last one's, which are kept:
at most [chunk, V] logits live at a time. What is done to them in float32 is done to a block of rows
that fits in a cache.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from posttrain.core.math.nucleus import Cut, log_kept_mass
from posttrain.core.models.linear import product, product_type
from posttrain.core.models.paths import HeadShape, OutputHead, project

logger = logging.getLogger(__name__)

Scores = Callable[[Tensor, float], tuple[Tensor, Tensor, Tensor]]
Gradient = Callable[[Tensor, float, Tensor, Tensor], Tensor]
EntropyGradient = Callable[[Tensor, float, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class BlockMath:
    scores: Scores
    gradient: Gradient
    entropy_gradient: EntropyGradient


def scaled(logits: Tensor, inv_temperature: float) -> Tensor:
    """A copy in at least float32 (float64 stays float64), at the temperature."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    return wide if inv_temperature == 1.0 else wide.mul_(inv_temperature)


def scores(logits: Tensor, inv_temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """The largest of `logits` [n, V] and the log of the sum of exp(logits less it), [n, 1] each,
    and the entropy [n] in nats."""
    shifted = scaled(logits, inv_temperature)
    top = shifted.amax(dim=1, keepdim=True)
    shifted -= top
    probs = shifted.exp()
    total = probs.sum(dim=1, keepdim=True)
    log_total = total.log()
    mean_logit = probs.mul_(shifted).sum(dim=1, keepdim=True) / total
    return top, log_total, (log_total - mean_logit).squeeze(1)


def gradient(logits: Tensor, inv_temperature: float, normaliser: Tensor, summed: Tensor) -> Tensor:
    """-p x `summed` [n] for p = exp(logits - `normaliser` [n, 1]): what tokens' log-probs give to
    all logits of their row, where `summed` is the sum of their gradients."""
    return scaled(logits, inv_temperature).sub_(normaliser).exp_().mul_(-summed[:, None])


def entropy_gradient(
    logits: Tensor,
    inv_temperature: float,
    normaliser: Tensor,
    summed: Tensor,
    entropy: Tensor,
    grad_entropy: Tensor,
) -> Tensor:
    """The same and what entropies [n] give: d H / d z = -p (log p + H)."""
    logp = scaled(logits, inv_temperature).sub_(normaliser)
    probs = logp.exp()
    grad = logp.add_(entropy[:, None])
    grad.mul_(probs).mul_(-grad_entropy[:, None])
    return grad.addcmul_(probs, summed[:, None], value=-1)


PLAIN = BlockMath(scores, gradient, entropy_gradient)


@functools.cache
def _compiled() -> BlockMath:
    parts = (torch.compile(f, dynamic=True) for f in (scores, gradient, entropy_gradient))
    found = cast("tuple[Scores, Gradient, EntropyGradient]", tuple(parts))
    return BlockMath(*found)


def why_plain(device: torch.device, *, compiled: bool) -> str | None:
    """Why blocks on `device` are not worked on by compiled kernels; None if they are."""
    if device.type == "cuda":
        missing = importlib.util.find_spec("triton") is None
        return "kernels need the package triton" if missing else None
    return None if compiled else "model.compile is off"


def block_math(device: torch.device, *, compiled: bool) -> BlockMath:
    reason = why_plain(device, compiled=compiled)
    if device.type == "cuda":
        _say_once(reason)
    return PLAIN if reason else _compiled()


@functools.cache
def _say_once(reason: str | None) -> None:
    how = "compiled kernels" if reason is None else f"plain operations: {reason}"
    logger.info("the head's softmax is by %s", how)


class Targets:
    """Token `ids` [N], each in a row of logits: its own, or that of `rows` [N], below `count`."""

    def __init__(self, ids: Tensor, rows: Tensor | None, count: int) -> None:
        self._ids, self._rows = ids, rows
        if rows is not None:
            self._order = rows.argsort(stable=True)
            ends = torch.bincount(rows, minlength=count).cumsum(0)
            self._starts = [0, *ends.tolist()]

    def __len__(self) -> int:
        return len(self._ids)

    def within(self, block: slice) -> tuple[slice | Tensor, Tensor, Tensor]:
        """Which tokens [n] are of rows `block`, which of these rows each is in, and their ids."""
        if self._rows is None:
            ids = self._ids[block]
            return block, torch.arange(len(ids), device=ids.device), ids
        which = self._order[self._starts[block.start] : self._starts[block.stop]]
        return which, self._rows[which] - block.start, self._ids[which]

    def summed(self, values: Tensor) -> Tensor:
        """The sum [M] of `values` [N] over the tokens of each row."""
        if self._rows is None:
            return values
        return values.new_zeros(len(self._starts) - 1).index_add_(0, self._rows, values)


@dataclass(frozen=True, slots=True)
class KnownLogits:
    """Rows `places` [M] of `values` [K, V]; `spent` when nobody else reads `values`.

    Then they may be overwritten, which takes places that ascend: row m is then written where no
    later row is read.
    """

    values: Tensor
    places: Tensor
    spent: bool = False

    def rows(self, block: slice) -> Tensor:
        """These rows; without a copy where they lie together."""
        places = self.places[block]
        first, last = int(places[0]), int(places[-1])
        if last - first == len(places) - 1 and bool((places.diff() == 1).all()):
            return self.values[first : last + 1]
        return self.values.index_select(0, places)

    def room(self) -> Tensor:
        """Room [M, V] for their gradients, which are to be written in order after being read."""
        if self.spent:
            return self.values[: len(self.places)]
        return self.values.new_empty(len(self.places), self.values.shape[1])


# Bytes of logits that a CPU makes at a time: few chunks, because the backward pass makes all but
# the last one's again and adds each one's gradient of the weight to a float32 sum. 49k words in
# bfloat16 are 2,688 rows, 152k words 832.
CPU_CHUNK_BYTES = 256 * 2**20
# Each chunk of a GPU adds all of the weight's gradient to its float32 sum: a few large ones.
GPU_CHUNK = 4096
# Rows that are worked on in float32 at a time: 49k words take 13 MB, a core's share of a cache.
BLOCK = 64
# A GPU has no such cache, and each block is some ten kernels: 152k words take 311 MB.
GPU_BLOCK = 512


def chunk_rows(device: torch.device, row_bytes: int) -> int:
    """Rows that are projected at a time on `device`, whose logits take `row_bytes` each."""
    if device.type == "cuda":
        return GPU_CHUNK
    return max(1, CPU_CHUNK_BYTES // row_bytes // BLOCK) * BLOCK


def block_rows(device: torch.device) -> int:
    return GPU_BLOCK if device.type == "cuda" else BLOCK


def _blocks(rows: slice, logits: Tensor | KnownLogits) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of the logits of `rows` among M: those made of them, or all that are known."""
    device = logits.device if isinstance(logits, Tensor) else logits.values.device
    for start in range(rows.start, rows.stop, block_rows(device)):
        here = slice(start, min(start + block_rows(device), rows.stop))
        if isinstance(logits, KnownLogits):
            yield here, logits.rows(here)
        else:
            yield here, logits[start - rows.start : here.stop - rows.start]


class _TokenLogprobs(torch.autograd.Function):
    """log p(target), entropy, log mass a cut keeps; gradients for hidden states, weight and bias.

    Without a weight the states are logits, which are `known` then. Under a cap blocks are of capped
    logits, and their gradient goes back through it.
    """

    @staticmethod
    def forward(
        ctx: Any,  # Any: torch's own context type is untyped
        hidden: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        shape: HeadShape,
        targets: Targets,
        inv_temperature: float,
        chunk: int,
        cut: Cut,
        known: KnownLogits | None,
        compiled: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        math = block_math(hidden.device, compiled=compiled)
        count = hidden.shape[0]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        if shape.cap is None:
            inv_temperature *= shape.scale
        logprobs = hidden.new_empty(len(targets), dtype=wide)
        masses = hidden.new_empty(len(targets) if cut else 0, dtype=wide)
        entropies, normalisers = [], []
        ctx.chunks = [slice(n, min(n + chunk, count)) for n in range(0, count, chunk)]
        if known is not None:
            ctx.chunks = [slice(0, count)]
        for rows in ctx.chunks:
            logits = _made(hidden[rows], weight, bias) if known is None else known
            for here, raw in _blocks(rows, logits):
                block = raw if shape.cap is None else shape.capped(raw)
                top, log_total, spread = math.scores(block, inv_temperature)
                which, own, ids = targets.within(here)
                chosen = scaled(block[own, ids], inv_temperature)
                logprobs[which] = (chosen - top[own, 0]) - log_total[own, 0]
                entropies.append(spread)
                normalisers.append(top + log_total)
                if cut:
                    distribution = (
                        scaled(block[own], inv_temperature).sub_(top[own]).sub_(log_total[own])
                    )
                    masses[which] = log_kept_mass(distribution, ids, cut)
        entropy = torch.cat(entropies)
        ctx.save_for_backward(hidden, weight, bias, torch.cat(normalisers), entropy)
        ctx.shape = shape
        ctx.inv_temperature, ctx.targets, ctx.math = inv_temperature, targets, math
        ctx.last = logits if any(ctx.needs_input_grad[:3]) else None
        ctx.mark_non_differentiable(masses)
        return logprobs, entropy, masses

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor, grad_masses: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, normaliser, entropy = ctx.saved_tensors
        last, ctx.last = ctx.last, None  # overwritten below: a second backward pass makes it again
        if last is None and weight is None:
            last = known_states(hidden)
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        shape: HeadShape = ctx.shape
        use_entropy = bool(grad_entropy.any())
        # The chain rule's factor, where there are n of them and not n x V.
        grad_logprobs = grad_logprobs * ctx.inv_temperature
        grad_entropy = grad_entropy * ctx.inv_temperature
        summed = ctx.targets.summed(grad_logprobs)
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        sums = _WeightGradient(weight, many=len(ctx.chunks) > 1)
        bias_sums = _WeightGradient(bias, many=True)
        for rows in reversed(ctx.chunks):
            logits, last = _made(hidden[rows], weight, bias) if last is None else last, None
            grads = logits.room() if isinstance(logits, KnownLogits) else logits
            for here, raw in _blocks(rows, logits):
                block = raw if shape.cap is None else shape.capped(raw)
                given = (block, ctx.inv_temperature, normaliser[here], summed[here])
                if use_entropy:
                    grad = ctx.math.entropy_gradient(*given, entropy[here], grad_entropy[here])
                else:
                    grad = ctx.math.gradient(*given)
                which, own, ids = ctx.targets.within(here)
                grad.index_put_((own, ids), grad_logprobs[which], accumulate=True)
                if shape.cap is not None:
                    # d cap tanh(scale z / cap) / d z
                    grad *= block.div_(shape.cap).square_().neg_().add_(1).mul_(shape.scale)
                grads[here.start - rows.start : here.stop - rows.start] = grad
            if grad_hidden is not None:
                grad_hidden[rows] = grads if weight is None else product(grads, weight)
            if need_weight:
                sums.add(product(grads.t(), hidden[rows]))
            if need_bias:
                bias_sums.add(grads.sum(dim=0))
        found = sums.total() if need_weight else None
        return grad_hidden, found, bias_sums.total() if need_bias else None, *(None,) * 8


def _made(hidden: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    assert weight is not None, "states that are logits are known"
    return project(hidden, weight, bias)


def known_states(hidden: Tensor) -> KnownLogits:
    """States [N, V] that are logits, which stay as they are."""
    return KnownLogits(hidden, torch.arange(len(hidden), device=hidden.device))


class _WeightGradient:
    """Sums chunks' gradients of a weight or bias; `many` of low precision in float32, or small
    terms vanish."""

    def __init__(self, weight: Tensor | None, *, many: bool) -> None:
        self._weight, self._many = weight, many
        self._sum: Tensor | None = None

    def add(self, part: Tensor) -> None:
        if self._sum is None:
            self._sum = part.float() if self._many and part.dtype == torch.bfloat16 else part
        else:
            self._sum += part

    def total(self) -> Tensor:
        assert self._weight is not None, "what is not there needs no gradient"
        found = torch.zeros_like(self._weight) if self._sum is None else self._sum
        return found.to(self._weight.dtype)


def cut_logprobs(
    hidden: Tensor,
    head: Tensor | OutputHead,
    targets: Tensor,
    cut: Cut,
    *,
    rows: Tensor | None = None,
    temperature: float = 1.0,
    chunk: int | None = None,
    known: KnownLogits | None = None,
    compiled: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs [N] (nats) of `targets` [N], entropies [N], and the log mass [N] that `cut` keeps.

    The mass is [0] where nothing is cut. `hidden` is [N, H]; `head` is what makes logits, or its
    matrix [V, H] alone. With `rows` [N] `hidden` is [M, H] and a target is looked up in the logits
    of that row of it: tokens that follow the same ones have one state. A log-prob less the mass is
    the one under the cut and renormalised distribution; the mass is detached, and made from the
    same logits. Logits [M, V] of the head's layer that are `known` are not made again in the
    forward pass. `compiled` as `why_plain` says.
    """
    if isinstance(head, Tensor):
        head = OutputHead(head)
    weight = head.weight
    if targets.shape[0] == 0:
        zero = hidden[:0].sum(dim=1).float()
        zero = sum((0.0 * p.sum().float() for p in (weight, head.bias) if p is not None), zero)
        return zero, zero, zero.detach()
    made = product_type(hidden.dtype, hidden.device)
    vocabulary = hidden.shape[1] if weight is None else weight.shape[0]
    most = chunk_rows(hidden.device, vocabulary * made.itemsize)
    if weight is None:
        known = known_states(hidden.detach())
    looked_up = Targets(targets, rows, hidden.shape[0])
    values, entropy, kept = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden,
        weight,
        head.bias,
        head.shape,
        looked_up,
        1.0 / temperature,
        chunk or most,
        cut,
        known,
        compiled,
    )
    return values, entropy if rows is None else entropy[rows], kept
