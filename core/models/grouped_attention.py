"""Attention for decoding on a CPU, where the heads that share a key head are one product.

Axes: N sequences, L keys, S queries, H heads, K key heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posttrain.core.models.shared_prompts import SharedPrompts, attention_over_prompts
from posttrain.core.models.wide_products import product

GROUPED = "posttrain_grouped"
# Queries x keys from which SDPA with a mask beats the plain product on a CPU.
LONG_PROMPT = 512 * 512


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    shared_prompts: SharedPrompts | None = None,
    **kwargs: Any,  # Any: transformers passes what each model family has
) -> tuple[Tensor, None]:
    """Attention [N, S, H, D] of `query` [N, H, S, D] over `key`, `value` [N, K, L, D].

    The heads that share a key head become rows of one product, so the cache is not repeated for
    each of them at every token: on a CPU, decoding is 1.5 to 2 x as fast as with eager and SDPA.
    """
    if shared_prompts is not None:
        layer: Any = module.layer_idx  # Any: torch knows of modules and tensors alone
        return attention_over_prompts(query, key, value, scaling, shared_prompts, layer), None
    rows, heads, steps, _ = query.shape
    if steps * key.shape[2] > LONG_PROMPT:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return output, None
    groups = key.shape[1]
    stacked = query.reshape(rows, groups, heads // groups * steps, -1)
    scores = product(stacked, key.transpose(2, 3)).view(rows, heads, steps, -1) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    output = product(weights.view(rows, groups, heads // groups * steps, -1), value)
    return output.view(rows, heads, steps, -1).transpose(1, 2).contiguous(), None


def can_group(model: Any) -> bool:  # Any: transformers' model classes are not typed
    """Whether plain softmax attention is all the model needs (no sinks, no soft cap)."""
    capped = getattr(model.config, "attn_logit_softcapping", None)
    return bool(model._supports_attention_backend and model._supports_sdpa and not capped)


def use_grouped_attention(model: Any) -> None:  # Any: as above
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    AttentionInterface.register(GROUPED, grouped_attention)
    AttentionMaskInterface.register(GROUPED, eager_mask)
    model.set_attn_implementation(GROUPED)
