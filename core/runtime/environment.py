"""What, beside its inputs, a float of a step can depend on: program, libraries, machine."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping, Sequence

import torch

from posttrain.core.identity import source_digest
from posttrain.core.runtime.processor import processor_name


def environment(device: torch.device, dtype: torch.dtype, engine: str) -> dict[str, str]:
    """By name, as people would say it; `engine` is the one that samples."""
    on_gpu = device.type == "cuda"
    return {
        "posttrain": importlib.metadata.version("posttrain"),
        "posttrain's source": source_digest()[:12],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "machine": platform.node(),
        "processor": processor_name(),
        "device": torch.cuda.get_device_name(device) if on_gpu else device.type,
        "precision": str(dtype).removeprefix("torch."),
        "CPU threads": str(torch.get_num_threads()),
        "engine": engine,
    }


def with_plugins(
    found: Mapping[str, str], plugins: Sequence[tuple[str, str, str, str]]
) -> dict[str, str]:
    """`found`, and the package of each plugin (kind, name, package, version)."""
    used = {f"{kind} plugin {name}": f"{package} {ver}" for kind, name, package, ver in plugins}
    return {**found, **used}


def differences(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """One sentence's part for each difference: `torch 2.15.0 then, 2.14.1 now`."""
    names = [*then, *(name for name in now if name not in then)]
    changed = [name for name in names if then.get(name) != now.get(name)]
    return [
        f"{name} {then.get(name, 'was not there')} then, {now.get(name, 'not there')} now"
        for name in changed
    ]
