"""How models are held in memory; apart from loading them, which imports transformers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from posttrain.core.config.sections import ModelSection
from posttrain.core.models.wide_products import is_emulated
from posttrain.core.runtime.compiler import check_compiler
from posttrain.core.runtime.device import choose_attention, choose_device, choose_dtype


@dataclass(frozen=True, slots=True)
class ModelRuntime:
    """How models are held in memory: device, compute precision, attention implementation.

    With `autocast` a model that is trained has float32 weights and computes in `dtype`.
    """

    device: torch.device
    dtype: torch.dtype
    attention: str
    autocast: bool = False

    @classmethod
    def from_config(cls, section: ModelSection) -> ModelRuntime:
        device = choose_device(section)
        if section.compile:
            check_compiler(device)
        return cls(
            device, choose_dtype(section), choose_attention(section), section.dtype == "autocast"
        )

    @property
    def plain_attention(self) -> str:
        """transformers' own implementation; on a CPU eager beats SDPA at short lengths."""
        if self.attention != "stream":
            return self.attention
        eager = self.device.type == "cpu" and not is_emulated(self.dtype, self.device)
        return "eager" if eager else "sdpa"
