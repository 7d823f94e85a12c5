"""Where a model keeps its decoder layers."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel


def decoder_layers(model: PreTrainedModel) -> torch.nn.ModuleList:
    """The decoder layers: the longest list of modules that the backbone has."""
    lists = [m for m in model.base_model.modules() if isinstance(m, torch.nn.ModuleList)]
    return max(lists, key=len)
