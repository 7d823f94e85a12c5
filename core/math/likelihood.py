"""Negative log-likelihood of given tokens, plain or weighted by the policy's own probability.

Axes: B sequences, T tokens.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from posttrain.core.math.masking import masked

TokenWeight = Literal["none", "dft", "phi"]


def token_nll(logprobs: Tensor, mask: Tensor, weight: TokenWeight = "none") -> Tensor:
    """-w logprobs [B, T] in nats, 0 under the mask; the weight w takes no gradient.

    none: 1. dft: the token's probability p, so that the gradient in a log-prob is -p and tokens the
    policy thinks impossible are not chased. phi: p (1 - p), which leaves sure tokens alone as well.
    Sources: DFT, arXiv:2508.05629, eq. 9; CHORD, arXiv:2508.11408.
    """
    own = masked(logprobs, mask)
    if weight == "none":
        return -own
    held = own.detach()
    factor = held.exp()
    if weight == "phi":
        factor = factor * -held.expm1()
    return -factor * own
