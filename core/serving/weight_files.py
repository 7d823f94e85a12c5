"""Weights on their way to servers: safetensors files, whole or not there, with a digest."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from posttrain.core.artifacts import combine_digests, file_digest
from posttrain.core.durable import put_in_place
from posttrain.core.errors import ResourceError

SHARD_BYTES = 2 * 2**30


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """A complete folder of `*.safetensors` and the digest over their contents."""

    folder: Path
    digest: str


def digest_of(folder: Path) -> str:
    return combine_digests({p.name: file_digest(p) for p in sorted(folder.glob("*.safetensors"))})


def write_weights(
    parent: Path, name: str, weights: Mapping[str, Tensor], dtype: torch.dtype
) -> WeightFiles:
    """Write `weights`, in `dtype`, to the folder `parent/name`; it replaces one of that name."""
    from safetensors.torch import save_file

    partial, final = parent / f".partial-{name}", parent / name
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        for number, shard in enumerate(_shards(weights, dtype)):
            save_file(shard, partial / f"model-{number:05d}.safetensors")
        digest = digest_of(partial)
        put_in_place(partial, final)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ResourceError(
            f"weights for the servers cannot be written to {final}: {error}; free some space, or "
            "set engine.sync_dir to a folder that all servers can read"
        ) from error
    return WeightFiles(final, digest)


def _shards(weights: Mapping[str, Tensor], dtype: torch.dtype) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in weights.items():
        copy = tensor.detach().to("cpu", dtype).contiguous()
        if size and size + copy.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = copy
        size += copy.nbytes
    return shards
