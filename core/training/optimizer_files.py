"""An optimizer's tensors in files: one folder for each kind, whole or in the pieces of ranks.

Pieces are those of torch.distributed.checkpoint in its safetensors form, which puts them together
again for any number of ranks; what one process wrote is one whole file, which it reads as well.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

Kinds = dict[str, dict[str, Tensor]]
"""Tensors by their kind ("master", "exp_avg"), then by the number of their parameter."""

_WHOLE = "whole.safetensors"


def write_kinds(kinds: Mapping[str, Mapping[str, Tensor]], folder: Path) -> None:
    """Write `kinds` below `folder`; on several ranks all of them must."""
    for kind, tensors in kinds.items():
        (folder / kind).mkdir(parents=True, exist_ok=True)
        if _several_ranks():
            writer = HuggingFaceStorageWriter(path=str(folder / kind), save_distributed=True)
            save(dict(tensors), storage_writer=writer)
        else:
            found = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            save_file(found, folder / kind / _WHOLE)


def read_kinds(folder: Path, like: Callable[[str, str], Tensor]) -> Kinds:
    """What `write_kinds` wrote, whatever number of ranks did."""
    return {path.name: _read(path, like) for path in sorted(folder.iterdir()) if path.is_dir()}


def _read(folder: Path, like: Callable[[str, str], Tensor]) -> dict[str, Tensor]:
    alone = not _several_ranks()
    if alone and (folder / _WHOLE).is_file():
        return load_file(folder / _WHOLE)
    reader = HuggingFaceStorageReader(str(folder))
    names = reader.read_metadata().state_dict_metadata
    tensors = {name: torch.zeros_like(like(folder.name, name)) for name in names}
    with warnings.catch_warnings():  # that this is one process
        warnings.simplefilter("ignore", UserWarning)
        load(tensors, storage_reader=reader, no_dist=alone)
    return tensors


def _several_ranks() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1
