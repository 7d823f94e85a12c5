"""LoRA adapters in peft's format: what is checked before an engine is given one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from posttrain.core.errors import RunError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


def check_adapter(
    folder: Path, shapes: Mapping[str, Sequence[int]], max_rank: int | None = None
) -> None:
    """Raise `RunError` unless `folder` holds a LoRA adapter for the weights of `shapes`.

    Only pairs A [rank, in], B [out, rank] of weights [out, in] are taken, of `max_rank` at most.
    """
    missing = [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]
    if missing:
        raise RunError(
            f"no adapter at {folder}: {' and '.join(missing)} missing; expected what peft's "
            "save_pretrained writes (the engine keeps what it has)"
        )
    try:
        kind = json.loads((folder / CONFIG).read_text("utf-8"))["peft_type"]
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            found = {name: file.get_slice(name).get_shape() for name in file.keys()}
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise RunError(f"the adapter at {folder} cannot be read: {error!r}") from error
    problem = f"it is a '{kind}', expected LORA" if kind != "LORA" else ""
    problem = problem or _misfit(found, shapes, max_rank)
    if problem:
        raise RunError(
            f"the adapter at {folder} does not fit: {problem} (the engine keeps its own)"
        )


def _misfit(
    found: Mapping[str, Sequence[int]],
    shapes: Mapping[str, Sequence[int]],
    max_rank: int | None,
) -> str:
    """What is wrong with the adapter's tensors; empty when nothing is."""
    if not found:
        return "it has no tensors"
    for name, shape in found.items():
        end = A if name.endswith(A) else B
        base = shapes.get(name.removeprefix(PREFIX).removesuffix(end) + ".weight")
        if not (name.startswith(PREFIX) and name.endswith(end)) or base is None:
            return f"it changes '{name}', which is no weight of this model that engines can adapt"
        rank, width = shape if end == A else reversed(shape)
        if len(base) != 2 or width != base[1 if end == A else 0]:
            return f"'{name}' is {list(shape)} for a weight of {list(base)}"
        if max_rank is not None and rank > max_rank:
            return f"'{name}' has rank {rank}, above engine.max_lora_rank {max_rank}: raise that"
    return ""
