"""Which models can compute a prompt once for all of its responses, and why others cannot."""

from __future__ import annotations

from typing import Any

from posttrain.core.models.checkpointing import is_checkpointed
from posttrain.core.models.grouped_attention import can_group

ATTENTION = frozenset({"full_attention", "sliding_attention"})


def why_no_stream(model: Any) -> str | None:  # Any: transformers' model classes are not typed
    """Why a model's prompts cannot be shared in one stream; None if they can."""
    config = model.config.get_text_config()
    reason = _other_memory(model)
    if reason is not None:
        return reason
    if not can_group(model):
        return f"model type '{config.model_type}' has attention of its own"
    if config is not model.config:
        return f"model type '{model.config.model_type}' is more than a language model"
    return None


def why_no_shared_keys(model: Any) -> str | None:  # Any: as above
    """Why responses cannot start from their prompt's keys and values; None if they can."""
    if is_checkpointed(model):
        return "gradient checkpointing keeps no keys and values"
    return _other_memory(model)


def _other_memory(model: Any) -> str | None:  # Any: as above
    """What else than keys and values the model knows of earlier tokens by."""
    config = model.config.get_text_config()
    kinds = {str(kind) for kind in getattr(config, "layer_types", None) or ()} - ATTENTION
    if kinds:
        return f"model type '{config.model_type}' has layers of type {', '.join(sorted(kinds))}"
    if getattr(model, "_is_stateful", False):
        return f"model type '{config.model_type}' carries a state from token to token"
    return None


def widest_window(model: Any) -> int | None:  # Any: as above
    """The tokens that a layer with a sliding window sees; None without such layers."""
    config = model.config
    layers = getattr(config, "layer_types", None)
    if layers is not None and "sliding_attention" not in layers:
        return None
    window: int | None = getattr(config, "sliding_window", None)
    return window
