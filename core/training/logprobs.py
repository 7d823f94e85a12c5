"""Token log-probs and entropy from hidden states without ever holding all logits.

N tokens, H hidden size, V vocabulary. The projection runs in chunks of rows; the backward pass
recomputes each chunk's logits, so at most [chunk, V] float32 values live at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posttrain.core.math.masking import masked
from posttrain.core.math.nucleus import Cut, log_kept_mass

DEFAULT_CHUNK = 1024


def _chunk_log_softmax(hidden: Tensor, weight: Tensor, inv_temperature: float) -> Tensor:
    """Log-softmax [n, V] of one chunk in at least float32 (float64 inputs stay float64)."""
    logits = hidden @ weight.t()
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return torch.log_softmax(logits.mul_(inv_temperature), dim=-1)


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
    ) -> tuple[Tensor, Tensor, Tensor]:
        logprobs, entropies, kept = [], [], []
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            logp = _chunk_log_softmax(hidden[rows], weight, inv_temperature)
            logprobs.append(logp.gather(1, targets[rows, None]).squeeze(1))
            entropies.append(-torch.einsum("nv,nv->n", logp, logp.exp()))
            if cut:
                kept.append(log_kept_mass(logp, targets[rows], cut))
        ctx.save_for_backward(hidden, weight, targets)
        ctx.inv_temperature, ctx.chunk = inv_temperature, chunk
        masses = torch.cat(kept) if kept else hidden.new_zeros(0)
        ctx.mark_non_differentiable(masses)
        return torch.cat(logprobs), torch.cat(entropies), masses

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor, grad_masses: Tensor
    ) -> tuple[Tensor, Tensor, None, None, None, None]:
        hidden, weight, targets = ctx.saved_tensors
        use_entropy = bool(grad_entropy.any())
        grad_hidden = torch.empty_like(hidden)
        grad_weight: Tensor | None = None
        for start in range(0, hidden.shape[0], ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            logp = _chunk_log_softmax(hidden[rows], weight, ctx.inv_temperature)
            probs = logp.exp()
            if use_entropy:  # d H / d z = -p (log p + H)
                entropy = -torch.einsum("nv,nv->n", logp, probs)
                grad = logp.add_(entropy[:, None]).mul_(probs).mul_(-grad_entropy[rows, None])
                grad.addcmul_(probs, grad_logprobs[rows, None], value=-1)
            else:
                grad = probs.mul_(-grad_logprobs[rows, None])
            grad.scatter_add_(1, targets[rows, None], grad_logprobs[rows, None])
            grad = grad.mul_(ctx.inv_temperature).to(hidden.dtype)
            grad_hidden[rows] = grad @ weight
            part = grad.t() @ hidden[rows]
            if grad_weight is None:
                # Summing many low-precision chunks would lose small terms: sum in float32.
                many = hidden.shape[0] > ctx.chunk and part.dtype == torch.bfloat16
                grad_weight = part.float() if many else part
            else:
                grad_weight += part
        if grad_weight is None:
            grad_weight = torch.zeros_like(weight)
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int = DEFAULT_CHUNK,
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
    chunk: int = DEFAULT_CHUNK,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `token_logprobs` gives, and the log mass [N] that `cut` keeps ([0] where it cuts none).

    A log-prob less that mass is the one under the cut and renormalised distribution. The mass is
    detached, and made chunk by chunk from the same logits.
    """
    if hidden.shape[0] == 0:
        zero = hidden.sum(dim=1).float() + 0.0 * weight.sum().float()
        return zero, zero, zero.detach()
    values, entropy, kept = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, 1.0 / temperature, chunk, cut
    )
    return values, entropy, kept


def entropy_of_logits(logits: Tensor) -> Tensor:
    """Entropy [...] (nats) of softmax(`logits`) over the last axis, with gradient.

    Tokens of probability 0 (a logit of -inf) add nothing.
    """
    logp = torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1)
    probs = logp.exp()
    return -(probs * masked(logp, probs > 0)).sum(dim=-1)
