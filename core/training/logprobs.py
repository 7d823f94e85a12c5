"""Token log-probs and entropy from hidden states without ever holding all logits.

N tokens, H hidden size, V vocabulary. The projection runs in chunks of rows, and the backward pass
makes each chunk's logits again, but for the last one's, which are kept: at most [chunk, V] logits
live at a time. What is done to them in float32 is done to a block of rows that fits in a cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from posttrain.core.math.masking import masked
from posttrain.core.math.nucleus import Cut, log_kept_mass

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
    """Rows that are worked on in float32 at a time on `device`."""
    return GPU_BLOCK if device.type == "cuda" else BLOCK


def _scaled(logits: Tensor, inv_temperature: float) -> Tensor:
    """A copy of a block [n, V] in at least float32 (float64 stays float64), at the temperature."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    return wide if inv_temperature == 1.0 else wide.mul_(inv_temperature)


def _blocks(start: int, logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of a chunk's logits [n, V], which begins at row `start`, with their rows among N."""
    size = block_rows(logits.device)
    for offset in range(0, len(logits), size):
        block = logits[offset : offset + size]
        yield slice(start + offset, start + offset + len(block)), block


class _TokenLogprobs(torch.autograd.Function):
    """log p(target), entropy, log mass a cut keeps; gradients for hidden states and weight."""

    @staticmethod
    def forward(
        ctx: Any,  # Any: torch's own context type is untyped
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        inv_temperature: float,
        chunk: int,
        cut: Cut,
        known: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if known is not None:
            chunk = len(known)
        logprobs, entropies, normalisers, kept = [], [], [], []
        for start in range(0, hidden.shape[0], chunk):
            logits = hidden[start : start + chunk] @ weight.t() if known is None else known
            for rows, block in _blocks(start, logits):
                shifted = _scaled(block, inv_temperature)
                top = shifted.amax(dim=1, keepdim=True)
                shifted -= top
                probs = shifted.exp()
                total = probs.sum(dim=1, keepdim=True)
                log_total = total.log()
                logprobs.append((shifted.gather(1, targets[rows, None]) - log_total).squeeze(1))
                mean_logit = probs.mul_(shifted).sum(dim=1, keepdim=True) / total
                entropies.append((log_total - mean_logit).squeeze(1))
                normalisers.append(top + log_total)
                if cut:
                    kept.append(log_kept_mass(shifted.sub_(log_total), targets[rows], cut))
        entropy = torch.cat(entropies)
        ctx.save_for_backward(hidden, weight, targets, torch.cat(normalisers), entropy)
        ctx.inv_temperature, ctx.chunk = inv_temperature, chunk
        ctx.last = logits if any(ctx.needs_input_grad[:2]) else None
        masses = torch.cat(kept) if kept else hidden.new_zeros(0)
        ctx.mark_non_differentiable(masses)
        return torch.cat(logprobs), entropy, masses

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor, grad_masses: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None, None]:
        hidden, weight, targets, normaliser, entropy = ctx.saved_tensors
        last, ctx.last = ctx.last, None  # overwritten below: a second backward pass makes it again
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        use_entropy = bool(grad_entropy.any())
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        sums = _WeightGradient(weight, many=hidden.shape[0] > ctx.chunk)
        starts = range(0, hidden.shape[0], ctx.chunk)
        for start in reversed(starts):
            here = slice(start, start + ctx.chunk)
            kept = last if start == starts[-1] else None
            logits = hidden[here] @ weight.t() if kept is None else kept
            for rows, block in _blocks(start, logits):
                logp = _scaled(block, ctx.inv_temperature).sub_(normaliser[rows])
                if use_entropy:  # d H / d z = -p (log p + H)
                    probs = logp.exp()
                    grad = logp.add_(entropy[rows, None])
                    grad.mul_(probs).mul_(-grad_entropy[rows, None])
                    grad.addcmul_(probs, grad_logprobs[rows, None], value=-1)
                else:
                    grad = logp.exp_().mul_(-grad_logprobs[rows, None])
                grad.scatter_add_(1, targets[rows, None], grad_logprobs[rows, None])
                if ctx.inv_temperature != 1.0:
                    grad *= ctx.inv_temperature
                block.copy_(grad)
            if grad_hidden is not None:
                grad_hidden[here] = logits @ weight
            if need_weight:
                sums.add(logits.t() @ hidden[here])
        return grad_hidden, sums.total() if need_weight else None, None, None, None, None, None


class _WeightGradient:
    """Sums chunks' gradients [V, H]; `many` of low precision in float32, or small terms vanish."""

    def __init__(self, weight: Tensor, *, many: bool) -> None:
        self._weight, self._many = weight, many
        self._sum: Tensor | None = None

    def add(self, part: Tensor) -> None:
        """Add a chunk's."""
        if self._sum is None:
            self._sum = part.float() if self._many and part.dtype == torch.bfloat16 else part
        else:
            self._sum += part

    def total(self) -> Tensor:
        """The sum, as the weight is."""
        found = torch.zeros_like(self._weight) if self._sum is None else self._sum
        return found.to(self._weight.dtype)


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs [N] (nats) of `targets` [N] and entropies [N]: `hidden` [N, H], `weight` [V, H].

    The distribution is softmax(hidden @ weight.T / temperature). Both results carry gradients.
    """
    values, entropy, _ = cut_logprobs(
        hidden, weight, targets, Cut(), temperature=temperature, chunk=chunk
    )
    return values, entropy


def cut_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    cut: Cut,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    known: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `token_logprobs` gives, and the log mass [N] that `cut` keeps ([0] where it cuts none).

    A log-prob less that mass is the one under the cut and renormalised distribution. The mass is
    detached, and made chunk by chunk from the same logits. Logits [N, V] that are `known` are not
    made again in the forward pass, and overwritten in the backward pass.
    """
    if hidden.shape[0] == 0:
        zero = hidden.sum(dim=1).float() + 0.0 * weight.sum().float()
        return zero, zero, zero.detach()
    rows = chunk_rows(hidden.device, weight.shape[0] * weight.element_size())
    values, entropy, kept = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, 1.0 / temperature, chunk or rows, cut, known
    )
    return values, entropy, kept


def entropy_of_logits(logits: Tensor) -> Tensor:
    """Entropy [...] (nats) of softmax(`logits`) over the last axis, with gradient.

    Tokens of probability 0 (a logit of -inf) add nothing.
    """
    logp = torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1)
    probs = logp.exp()
    return -(probs * masked(logp, probs > 0)).sum(dim=-1)
