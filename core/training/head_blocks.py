"""What the head does to a block of logits in at least float32: plain operations, or one kernel.

Plain, each operation reads and writes the block; compiled, nothing as large as the block is kept
but its gradient. n rows, V vocabulary.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

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
