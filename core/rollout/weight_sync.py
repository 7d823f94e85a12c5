"""How a policy's weights reach the engine: all of them, or an adapter as an adapter."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from posttrain.core.contracts import RolloutEngine
from posttrain.core.models.lora import (
    base_weights,
    is_adapted,
    is_transposed,
    merged_weights,
    save_adapter,
)


def send_policy(engine: RolloutEngine[Any], model: PreTrainedModel, policy_version: int) -> None:
    if not is_adapted(model):
        engine.sync_weights(model.state_dict().items(), policy_version=policy_version)
    elif takes_adapter(engine, model):
        with tempfile.TemporaryDirectory(prefix="posttrain-adapter-") as folder:
            save_adapter(model, Path(folder))
            engine.sync_adapter(Path(folder), policy_version=policy_version)
    else:
        engine.sync_weights(merged_weights(model), policy_version=policy_version)


def weights_sent(
    engine: RolloutEngine[Any], model: PreTrainedModel
) -> Iterator[tuple[str, Tensor]]:
    """The weights, named as in a plain state dict, that `engine` has when it has `model`."""
    merged = is_adapted(model) and not takes_adapter(engine, model)
    yield from merged_weights(model) if merged else base_weights(model)


def takes_adapter(engine: RolloutEngine[Any], model: PreTrainedModel) -> bool:
    """Whether an engine knows what an adapter is, and can take this one."""
    knows = type(engine).sync_adapter is not RolloutEngine.sync_adapter
    return knows and not is_transposed(model)
