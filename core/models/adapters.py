"""LoRA adapters in peft's format: what is checked before an engine is given one."""

from __future__ import annotations

import json
from pathlib import Path

from posttrain.core.errors import RunError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def check_adapter(folder: Path, max_rank: int | None = None) -> None:
    """Raise `RunError` unless `folder` holds a LoRA adapter of at most `max_rank`."""
    missing = [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]
    if missing:
        raise RunError(
            f"no adapter at {folder}: {' and '.join(missing)} missing; expected what peft's "
            "save_pretrained writes (the engine keeps what it has)"
        )
    try:
        config = json.loads((folder / CONFIG).read_text("utf-8"))
        kind, rank = config["peft_type"], int(config["r"])
        ranks = [rank, *map(int, (config.get("rank_pattern") or {}).values())]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{folder / CONFIG} is no adapter's config: {error!r}") from error
    if kind != "LORA":
        raise RunError(f"the adapter at {folder} is a '{kind}', expected LORA")
    if max_rank is not None and max(ranks) > max_rank:
        raise RunError(
            f"the adapter at {folder} has rank {max(ranks)}, above engine.max_lora_rank "
            f"{max_rank}: raise it (the engine keeps what it has)"
        )
