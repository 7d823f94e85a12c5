"""Checkpoints of a training loop: complete or absent, never half-written.

A checkpoint holds what the loop cannot rebuild: master weights, moments and step count of the
policy and, if there is one, of the critic; what the plugins keep; the metric history. Everything
random is derived from (seed, step), so no generator state is needed.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Module

from posttrain.core.artifacts import file_digest
from posttrain.core.errors import RunError
from posttrain.core.training.optim import MasterOptimizer

_STATE = "state.json"
# One file for each: writing safetensors copies the whole file in memory first.
_TENSOR_FILES = ("master", "exp_avg", "exp_avg_sq", "step")
_CRITIC = "critic"
_REFERENCE = "reference.safetensors"
SCHEMA_VERSION = 4


@dataclass(frozen=True, slots=True)
class LoopState:
    """Where a loop stands after `step` steps, and the metrics of each step so far.

    `controller`, `estimator`, `losses` (by the loss's name), `critic`, `sampler` and `rewards` are
    what the KL controller, the advantage estimator, the policy losses, the critic's schedule, the
    sampler and the whitening of rewards keep; `prompts` counts those taken from the task;
    `rollouts` were sampled for steps to come.
    """

    step: int
    controller: dict[str, float]
    history: list[dict[str, float]]
    estimator: dict[str, float] = field(default_factory=dict)
    losses: dict[str, dict[str, float]] = field(default_factory=dict)
    critic: dict[str, float] = field(default_factory=dict)
    sampler: dict[str, Any] = field(default_factory=dict)  # Any: JSON
    prompts: int = 0
    rewards: dict[str, float] = field(default_factory=dict)
    rollouts: list[dict[str, Any]] = field(default_factory=list)  # Any: JSON


def save_checkpoint(
    folder: Path,
    optimizer: MasterOptimizer,
    state: LoopState,
    *,
    critic: MasterOptimizer | None = None,
    reference: Module | None = None,
) -> None:
    """Write `folder` anew: tensors first, the state with their digest last, then rename.

    The tensors of a `critic`'s optimizer lie in a folder of their own inside it. A `reference` is
    given when it is no longer what the stage started from.
    """
    partial = folder.with_name(f".partial-{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    record = {
        "version": SCHEMA_VERSION,
        **asdict(state),
        "optimizers": {
            place: _write_tensors(partial, place, one)
            for place, one in _by_place(optimizer, critic).items()
        },
        "reference": {} if reference is None else _write_reference(partial, reference),
    }
    with (partial / _STATE).open("w") as stream:
        json.dump(record, stream)
        stream.flush()
        os.fsync(stream.fileno())
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def load_checkpoint(
    folder: Path,
    optimizer: MasterOptimizer,
    *,
    critic: MasterOptimizer | None = None,
    reference: Module | None = None,
) -> LoopState:
    """Load `folder` into `optimizer`, and `critic`'s, and their models, and into `reference`.

    Raises `RunError` when it is damaged, or is of a loop with a critic and this one has none, or
    the other way round. Nothing is loaded then.
    """
    record = _read_record(folder)
    if record.get("version") != SCHEMA_VERSION:
        raise RunError(
            f"checkpoint '{folder}' has schema version {record.get('version')}, this program reads "
            f"{SCHEMA_VERSION}: run with --fresh to start the stage anew"
        )
    wanted, saved = _by_place(optimizer, critic), record["optimizers"]
    if set(wanted) != set(saved):
        has, needs = (("a" if _CRITIC in places else "no") for places in (saved, wanted))
        raise RunError(
            f"checkpoint '{folder}' has {has} critic, but the stage has {needs} critic: run with "
            "--fresh to start the stage anew"
        )
    digests = {name: d for part in saved.values() for name, d in part["sha256"].items()}
    digests |= record["reference"]
    paths = {folder / name: digest for name, digest in digests.items()}
    if any(not path.is_file() or file_digest(path) != digest for path, digest in paths.items()):
        raise RunError(
            f"checkpoint '{folder}' is damaged (a file is missing or its digest differs): run with "
            "--fresh to start the stage anew"
        )
    for place, one in wanted.items():
        _read_tensors(folder / place, one, saved[place]["step_count"])
    if reference is not None and record["reference"]:
        _read_reference(folder, reference)
    return LoopState(**{part.name: record[part.name] for part in fields(LoopState)})


def _by_place(
    optimizer: MasterOptimizer, critic: MasterOptimizer | None
) -> dict[str, MasterOptimizer]:
    """Each optimizer by the folder of its tensors, relative to the checkpoint's."""
    return {".": optimizer} if critic is None else {".": optimizer, _CRITIC: critic}


def _write_tensors(root: Path, place: str, optimizer: MasterOptimizer) -> dict[str, object]:
    """Write an optimizer's tensors; its step count and the files' digests, by path in `root`."""
    (root / place).mkdir(exist_ok=True)
    paths = {name: root / place / f"{name}.safetensors" for name in _TENSOR_FILES}
    for name, path in paths.items():
        save_file(_tensors_of(optimizer, name), path)
    digests = {path.relative_to(root).as_posix(): file_digest(path) for path in paths.values()}
    return {"step_count": optimizer.step_count, "sha256": digests}


def _write_reference(root: Path, reference: Module) -> dict[str, str]:
    """Write a model's parameters, by number; the file's digest."""
    path = root / _REFERENCE
    tensors = {str(i): p.detach().cpu().contiguous() for i, p in enumerate(reference.parameters())}
    save_file(tensors, path)
    return {path.name: file_digest(path)}


def _read_reference(folder: Path, reference: Module) -> None:
    saved = load_file(folder / _REFERENCE)
    with torch.no_grad():
        for i, parameter in enumerate(reference.parameters()):
            parameter.copy_(saved[str(i)])


def _read_tensors(folder: Path, optimizer: MasterOptimizer, step_count: int) -> None:
    """Load an optimizer, and its model, from the tensor files in `folder`."""
    master, *moments = (load_file(folder / f"{name}.safetensors") for name in _TENSOR_FILES)
    adamw = optimizer.optimizer.state_dict()
    adamw["state"] = {
        int(i): {name: part[i] for name, part in zip(_TENSOR_FILES[1:], moments, strict=True)}
        for i in moments[0]
    }
    masters = [master[str(i)] for i in range(len(master))]
    optimizer.load_state_dict({"step_count": step_count, "masters": masters, "adamw": adamw})


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
    return int(_read_record(folder)["step"])


def _read_record(folder: Path) -> dict[str, Any]:
    """What `save_checkpoint` wrote beside the tensors."""
    try:
        record: dict[str, Any] = json.loads((folder / _STATE).read_text())
        if not isinstance(record, dict) or "step" not in record:
            raise ValueError("no object with a step")
    except ValueError as error:
        raise RunError(
            f"checkpoint '{folder}' is damaged ({_STATE} is not what was written: {error}): run "
            "with --fresh to start the stage anew"
        ) from error
    return record


def newest_checkpoint(root: Path) -> Path | None:
    """The complete checkpoint with the highest step below `root`, if any."""
    complete = [p for p in root.glob("step-*") if (p / _STATE).is_file()]
    return max(complete, key=lambda p: p.name, default=None)


def remove_older(root: Path, keep: Path) -> None:
    """Remove every checkpoint below `root` but `keep`."""
    for folder in root.glob("step-*"):
        if folder != keep:
            shutil.rmtree(folder, ignore_errors=True)
