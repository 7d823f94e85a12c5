"""`model.compile`: the decoder layers of a model that is trained, under torch.compile.

One layer is compiled and serves all, for any number of tokens; FlexAttention with it. Where a
stream's attention is by grids it stays outside: its shapes follow how prompts and responses happen
to lie, and each new way would be compiled again.
"""

from __future__ import annotations

import logging

import torch
from transformers import PreTrainedModel

from posttrain.core.models.layers import decoder_layers

logger = logging.getLogger(__name__)

# A layer is compiled with and without gradients, for inputs that need one and those that do not,
# for each stage's kind of batch. Beyond torch's limit of 8 it would go on uncompiled.
_WAYS = 64


def allow_ways() -> None:
    torch.compiler.config.recompile_limit = max(torch.compiler.config.recompile_limit, _WAYS)


def compile_layers(model: PreTrainedModel) -> None:
    """Let each decoder layer of `model` be compiled when it is first called."""
    allow_ways()
    for layer in decoder_layers(model):
        layer.compile(dynamic=True)
    logger.info("layers are compiled in the first updates, which take 10 to 30 s longer")


def is_compiled(model: PreTrainedModel) -> bool:
    return any(layer._compiled_call_impl is not None for layer in decoder_layers(model))
