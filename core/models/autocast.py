"""Float32 weights whose products are made in a lower precision (`torch.autocast`).

The weights are their own masters, so nothing copies them back after a step; in exchange every
product casts its weight. Norms, residual sums and softmaxes stay in float32.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel

_COMPUTES = "posttrain_compute_dtype"


def use_autocast(model: PreTrainedModel, compute: torch.dtype) -> None:
    setattr(model, _COMPUTES, compute)


def compute_dtype(model: PreTrainedModel) -> torch.dtype:
    """The precision of a model's products: that of its weights, unless it casts them."""
    found: torch.dtype = getattr(model, _COMPUTES, model.dtype)
    return found


def casting(model: PreTrainedModel) -> AbstractContextManager[Any]:  # Any: torch's is untyped
    compute = compute_dtype(model)
    if compute == model.dtype:
        return nullcontext()
    return torch.autocast(model.device.type, compute)
