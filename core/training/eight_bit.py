"""AdamW's moments in 8 bits, by bitsandbytes: codes, and a float32 scale for each block of 256.

arXiv:2110.02861. The library has a fused kernel for CUDA and needs no compiler; on a CPU it
is slow. The package is optional, so it is imported when a run asks for it.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import torch
from torch import Tensor

from posttrain.core.config.sections import OptimizerSection
from posttrain.core.errors import ResourceError

BLOCK = 256
# Smaller parameters (norms, biases) keep float32 moments, as in the library's own optimizer.
LEAST = 4096
_MISSING = (
    "optimizer.moments is '8bit', which needs the package bitsandbytes: "
    "pip install 'posttrain[low-memory]', or set optimizer.moments: float32"
)


def why_missing() -> str | None:
    """What to install before moments can be of 8 bits; None if they can."""
    return None if importlib.util.find_spec("bitsandbytes") else _MISSING


class EightBit:
    """AdamW's step on a part of a parameter whose moments are of 8 bits."""

    def __init__(self, section: OptimizerSection) -> None:
        if (reason := why_missing()) is not None:
            raise ResourceError(reason)
        import bitsandbytes.functional

        self._library: Any = bitsandbytes.functional
        self._section = section
        self._maps: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @staticmethod
    def fresh(param: Tensor) -> dict[str, Tensor]:
        scales = (math.ceil(param.numel() / BLOCK),)
        return {
            "exp_avg": torch.zeros(param.shape, dtype=torch.uint8, device=param.device),
            "exp_avg_sq": torch.zeros(param.shape, dtype=torch.uint8, device=param.device),
            "exp_avg_scale": torch.zeros(scales, device=param.device),
            "exp_avg_sq_scale": torch.zeros(scales, device=param.device),
        }

    def update(
        self, weights: Tensor, grad: Tensor, moments: dict[str, Tensor], rate: float, step: int
    ) -> None:
        """Move float32 `weights` [n] by `grad` [n]; `moments` are those of `fresh`, of this part.

        `step` counts from 1.
        """
        signed, unsigned = self._maps_on(weights.device)
        beta1, beta2 = self._section.betas
        self._library.optimizer_update_8bit_blockwise(
            "adam",
            grad,
            weights,
            moments["exp_avg"],
            moments["exp_avg_sq"],
            beta1,
            beta2,
            0.0,  # of optimizers with a third moment
            0.0,
            self._section.eps,
            step,
            rate,
            signed,
            unsigned,
            moments["exp_avg_scale"],
            moments["exp_avg_sq_scale"],
            self._section.weight_decay,
        )

    def _maps_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The values of the 256 codes, of both moments."""
        if device not in self._maps:
            signed = self._library.create_dynamic_map(signed=True)
            unsigned = self._library.create_dynamic_map(signed=False)
            self._maps[device] = signed.to(device), unsigned.to(device)
        return self._maps[device]
