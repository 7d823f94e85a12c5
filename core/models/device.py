"""Device, precision, threads and how models are held in memory."""

from __future__ import annotations

import os
import resource
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.core.config.sections import ModelSection
from posttrain.core.errors import ResourceError
from posttrain.core.models.linear import is_emulated
from posttrain.core.runtime.machine import check_compiler, has_bfloat16_instructions


def choose_device(section: ModelSection) -> torch.device:
    """The configured device; `auto` is CUDA when there is one."""
    if section.device == "cuda" and not torch.cuda.is_available():
        raise ResourceError(
            "model.device is 'cuda' but torch finds no CUDA device: install a CUDA build of torch, "
            "or set model.device: auto"
        )
    if section.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(section.device)


def choose_dtype(section: ModelSection) -> torch.dtype:
    """The precision of products; `auto` is the faster one here."""
    if section.dtype == "auto":
        fast = is_cuda(choose_device(section)) or has_bfloat16_instructions()
        return torch.bfloat16 if fast else torch.float32
    return torch.float32 if section.dtype == "float32" else torch.bfloat16


def cpu_threads(num_threads: int) -> int:
    """`num_threads`; if that is 0, OMP_NUM_THREADS, or else all cores that this process may use."""
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    asked = int(given) if given.isdecimal() and len(given) <= 4 else 0  # as OpenMP, else ignored
    return num_threads or asked or len(os.sched_getaffinity(0))


def set_threads(num_threads: int) -> None:
    """Use `cpu_threads(num_threads)` threads."""
    torch.set_num_threads(cpu_threads(num_threads))


def peak_memory_gb() -> float:
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / 1e9


def is_cuda(device: torch.device) -> bool:
    return device.type == "cuda"


@dataclass(frozen=True, slots=True)
class ModelRuntime:
    """How models are held in memory: device, compute precision, attention implementation.

    Attention `auto` is one stream, which pads nothing and shares each prompt. With `autocast` a
    model that is trained has float32 weights and computes in `dtype`.
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
        attention = "stream" if section.attention == "auto" else section.attention
        return cls(device, choose_dtype(section), attention, section.dtype == "autocast")

    @property
    def plain_attention(self) -> str:
        """transformers' own implementation; on a CPU eager beats SDPA at short lengths."""
        if self.attention != "stream":
            return self.attention
        eager = self.device.type == "cpu" and not is_emulated(self.dtype, self.device)
        return "eager" if eager else "sdpa"


def require_numbers(found: Tensor, what: str) -> None:
    """Raise `ResourceError` if a model gave NaN; -inf is the log-prob of a token it excludes."""
    if found.isnan().any():
        raise ResourceError(
            f"the model gives {what} that are not numbers (NaN): its weights are damaged, or too "
            "large for model.dtype; set model.dtype: float32, or choose another model"
        )
