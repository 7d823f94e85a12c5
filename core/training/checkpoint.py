"""Checkpoints of a training loop: complete or absent, never half-written.

A checkpoint holds what the loop cannot rebuild: master weights, moments, step count, the KL
controller's state and the metric history. Everything random is derived from (seed, step), so no
generator state is needed.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from posttrain.core.artifacts import file_digest
from posttrain.core.errors import RunError
from posttrain.core.training.optim import MasterOptimizer

_STATE = "state.json"
# One file for each: writing safetensors copies the whole file in memory first.
_TENSOR_FILES = ("master", "exp_avg", "exp_avg_sq", "step")
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class LoopState:
    """Where a loop stands after `step` steps, and the metrics of each step so far."""

    step: int
    controller: dict[str, float]
    history: list[dict[str, float]]


def save_checkpoint(folder: Path, optimizer: MasterOptimizer, state: LoopState) -> None:
    """Write `folder` anew: tensors first, the state with their digest last, then rename."""
    partial = folder.with_name(f".partial-{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    digests = {}
    for name in _TENSOR_FILES:
        path = partial / f"{name}.safetensors"
        save_file(_tensors_of(optimizer, name), path)
        digests[path.name] = file_digest(path)
    record = {
        "version": SCHEMA_VERSION,
        "step": state.step,
        "step_count": optimizer.step_count,
        "controller": state.controller,
        "history": state.history,
        "sha256": digests,
    }
    with (partial / _STATE).open("w") as stream:
        json.dump(record, stream)
        stream.flush()
        os.fsync(stream.fileno())
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def load_checkpoint(folder: Path, optimizer: MasterOptimizer) -> LoopState:
    """Load `folder` into `optimizer` (and its model); raises `RunError` when it is damaged."""
    record = json.loads((folder / _STATE).read_text())
    if record.get("version") != SCHEMA_VERSION:
        raise RunError(
            f"checkpoint '{folder}' has schema version {record.get('version')}, this program reads "
            f"{SCHEMA_VERSION}: run with --fresh to start the stage anew"
        )
    if any(file_digest(folder / name) != digest for name, digest in record["sha256"].items()):
        raise RunError(
            f"checkpoint '{folder}' is damaged (its digest differs): run with --fresh to start the "
            "stage anew"
        )
    master, *moments = (load_file(folder / f"{name}.safetensors") for name in _TENSOR_FILES)
    adamw = optimizer.optimizer.state_dict()
    adamw["state"] = {
        int(i): {name: part[i] for name, part in zip(_TENSOR_FILES[1:], moments, strict=True)}
        for i in moments[0]
    }
    masters = [master[str(i)] for i in range(len(master))]
    optimizer.load_state_dict(
        {"step_count": record["step_count"], "masters": masters, "adamw": adamw}
    )
    return LoopState(record["step"], record["controller"], record["history"])


def _tensors_of(optimizer: MasterOptimizer, name: str) -> dict[str, Tensor]:
    """Tensors of one kind, by parameter number; moments exist once a step was taken."""
    state = optimizer.state_dict()
    if name == "master":
        found = dict(enumerate(state["masters"]))
    else:
        found = {i: values[name] for i, values in state["adamw"]["state"].items()}
    return {str(i): tensor.detach().cpu().contiguous() for i, tensor in found.items()}


def read_step(folder: Path) -> int:
    """The step after which the checkpoint in `folder` was written."""
    return int(json.loads((folder / _STATE).read_text())["step"])


def newest_checkpoint(root: Path) -> Path | None:
    """The complete checkpoint with the highest step below `root`, if any."""
    complete = [p for p in root.glob("step-*") if (p / _STATE).is_file()]
    return max(complete, key=lambda p: p.name, default=None)


def remove_older(root: Path, keep: Path) -> None:
    """Remove every checkpoint below `root` but `keep`."""
    for folder in root.glob("step-*"):
        if folder != keep:
            shutil.rmtree(folder, ignore_errors=True)
