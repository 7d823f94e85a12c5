"""Stochastic rounding to bfloat16: up or down at random, so that the mean is the value itself.

arXiv:2010.06192. An update smaller than half a bfloat16 step is lost by rounding to nearest, every
time; rounded like this, it moves the weight as often as it should.
"""

from __future__ import annotations

import torch
from torch import Tensor

# bfloat16 is the upper half of a float32.
_LOW_BITS = 16


def round_stochastically(values: Tensor, chance: torch.Generator) -> Tensor:
    """float32 `values` as bfloat16, each one of its two neighbours, the nearer one more often.

    `chance` is a generator on the device of `values`. A value that bfloat16 has stays as it is,
    and so do infinities and NaN.
    """
    noise = torch.randint(
        1 << _LOW_BITS, values.shape, generator=chance, dtype=torch.int32, device=values.device
    )
    # Adding to the bits moves away from 0; what is carried into the upper half is the rounding.
    bits = values.view(torch.int32).add(noise).bitwise_and_(-1 << _LOW_BITS)
    return torch.where(values.isfinite(), bits.view(torch.float32), values).to(torch.bfloat16)
