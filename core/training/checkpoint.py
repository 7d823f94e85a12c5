"""Checkpoints of a training loop: complete or absent, and which ones are kept.

A checkpoint holds what the loop cannot rebuild: master weights, moments and step count of the
policy and, if there is one, of the critic; what the plugins keep; the metric history. Everything
random is derived from (seed, step), so no generator state is needed.

While a stage runs, its folder has `step-000010` and so on. Once it is done, those that stay for
replay lie in `kept/`, where a stage that is computed again does not take them for its own.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel
from safetensors import SafetensorError
from safetensors.torch import load_file

from posttrain.core.config.sections import KeepSection
from posttrain.core.errors import RunError
from posttrain.core.runtime.files import (
    WrongContent,
    link_or_copy,
    of_shape,
    put_in_place,
    read_json,
)
from posttrain.core.store.manifests import file_digest
from posttrain.core.store.remote import StoreAway

if TYPE_CHECKING:
    from posttrain.core.training.optim import StoredOptimizer


_STATE = "state.json"
_TENSORS = "optimizer"
_POLICY = "."
CRITIC, REFERENCE, PRM = "critic", "reference", "implicit_prm"
"""Places of the tensors, in a checkpoint, of what is trained or moves next to the policy."""
SCHEMA_VERSION = 7


class DamagedCheckpoint(RunError):
    """A checkpoint whose files are not those that were written."""


@dataclass(frozen=True, slots=True)
class LoopState:
    """Where a loop stands after `step` steps, and the metrics of each step so far.

    `parts` has what the plugins and other parts of the loop keep, by the part's name.
    """

    step: int
    parts: Mapping[str, Any]  # Any: JSON, each part's own
    history: list[dict[str, float]]


def save_checkpoint(
    folder: Path,
    optimizer: StoredOptimizer,
    state: LoopState,
    others: Mapping[str, StoredOptimizer] = MappingProxyType({}),
) -> None:
    """Write a new `folder`: tensors first, the state with their digest last, then rename.

    The tensors of `others` (`CRITIC`, `REFERENCE`, `PRM`) lie in folders of that name inside it.
    """
    partial = _partial(folder)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    record = {
        "version": SCHEMA_VERSION,
        **asdict(state),
        "optimizers": {
            place: _write_tensors(partial, place, one)
            for place, one in {_POLICY: optimizer, **others}.items()
        },
    }
    (partial / _STATE).write_text(json.dumps(record))
    put_in_place(partial, folder)


def _partial(folder: Path) -> Path:
    return folder.with_name(f".partial-{folder.name}")


def load_checkpoint(
    folder: Path,
    optimizer: StoredOptimizer,
    others: Mapping[str, StoredOptimizer] = MappingProxyType({}),
) -> LoopState:
    """Load `folder` into `optimizer` and `others`, and into their models.

    A moving reference and a process reward model in the checkpoint may be left alone.
    """
    record = _read_record(folder)
    if record.get("version") != SCHEMA_VERSION:
        raise RunError(
            f"checkpoint '{folder}' has schema version {record.get('version')}, this program reads "
            f"{SCHEMA_VERSION}: run with --fresh to start the stage over"
        )
    wanted, saved = {_POLICY: optimizer, **others}, record["optimizers"]
    if (CRITIC in wanted) != (CRITIC in saved):
        has, needs = (("a" if CRITIC in places else "no") for places in (saved, wanted))
        raise RunError(
            f"checkpoint '{folder}' has {has} critic, but the stage has {needs} critic: run with "
            "--fresh to start the stage over"
        )
    for place, what in ((REFERENCE, "moving reference"), (PRM, "process reward model")):
        if place in wanted and place not in saved:
            raise RunError(
                f"checkpoint '{folder}' has no {what}, but the stage has one: run with --fresh to "
                "start the stage over"
            )
    for place, one in wanted.items():
        if saved[place]["precision"] != one.precision:
            raise RunError(
                f"checkpoint '{folder}' keeps {saved[place]['precision']}, but the stage "
                f"{one.precision}: run with --fresh to start the stage over"
            )
    _check_files(folder, record)
    for place, one in wanted.items():
        one.read(folder / place / _TENSORS, saved[place]["step_count"])
    return LoopState(**{part.name: record[part.name] for part in fields(LoopState)})


def copy_checkpoint(
    source: Path,
    target: Path,
    *,
    change: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict,  # Any: JSON
    without: Collection[str] = (),
    history: Sequence[Mapping[str, float]] | None = None,
) -> None:
    """Make `target` a checkpoint of the same tensors, whose files are shared where the disk can.

    Its parts are what `change` makes of those there, and the optimizers in the folders `without`
    are left out. `history` takes the place of the metrics there. `source` must be whole.
    """
    record, partial = _read_record(source), _partial(target)
    shutil.rmtree(partial, ignore_errors=True)
    kept = {place: one for place, one in record["optimizers"].items() if place not in without}
    for name in (name for one in kept.values() for name in one["sha256"]):
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        link_or_copy(source / name, partial / name)
    changed = {**record, "parts": dict(change(record["parts"])), "optimizers": kept}
    if history is not None:
        changed["history"] = [dict(row) for row in history]
    (partial / _STATE).write_text(json.dumps(changed))
    put_in_place(partial, target)


def optimizers_in(folder: Path) -> list[str]:
    """The folders of the optimizers in a checkpoint: `.`, `critic`, `reference`, ..."""
    return list(_read_record(folder)["optimizers"])


def history_of(folder: Path) -> list[dict[str, float]]:
    """The metrics of each step that a checkpoint has behind it."""
    found: list[dict[str, float]] = _read_record(folder)["history"]
    return found


def _write_tensors(root: Path, place: str, optimizer: StoredOptimizer) -> dict[str, object]:
    """Write an optimizer's tensors; its step count and the files' digests, by path in `root`."""
    folder = root / place / _TENSORS
    folder.mkdir(parents=True)
    optimizer.write(folder)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    digests = {path.relative_to(root).as_posix(): file_digest(path) for path in paths}
    return {
        "step_count": optimizer.step_count,
        "precision": optimizer.precision,
        "sha256": digests,
    }


def check_whole(folder: Path) -> None:
    """Raise `DamagedCheckpoint` unless every file is there and is what was written."""
    _check_files(folder, _read_record(folder))


def _check_files(folder: Path, record: dict[str, Any]) -> None:
    if record.get("version") != SCHEMA_VERSION:
        return  # whole or not, `load_checkpoint` refuses it
    saved = [part["sha256"] for part in record["optimizers"].values()]
    digests = {name: digest for part in saved for name, digest in part.items()}
    paths = {folder / name: digest for name, digest in digests.items()}
    if any(not path.is_file() or file_digest(path) != digest for path, digest in paths.items()):
        raise DamagedCheckpoint(
            f"checkpoint '{folder}' is damaged (a file is missing or its digest differs): run with "
            "--fresh to start the stage over"
        )


def read_step(folder: Path) -> int:
    return int(_read_record(folder)["step"])


class _Versioned(BaseModel):
    version: int
    step: int


class _Tensors(BaseModel):
    step_count: int
    precision: str
    sha256: dict[str, str]


class _Record(_Versioned):
    """What is written next to the tensors."""

    parts: dict[str, Any]  # Any: JSON, each part's own
    history: list[dict[str, float]]
    optimizers: dict[str, _Tensors]


def _read_record(folder: Path) -> dict[str, Any]:
    """What `save_checkpoint` wrote next to the tensors."""
    try:
        record: dict[str, Any] = read_json(folder / _STATE, _Versioned)
        if record["version"] == SCHEMA_VERSION:
            of_shape(record, _Record)
    except WrongContent as error:
        raise DamagedCheckpoint(
            f"checkpoint '{folder}' is damaged ({_STATE} is not what was written: {error}): run "
            "with --fresh to start the stage over"
        ) from error
    return record


def is_complete(folder: Path) -> bool:
    return (folder / _STATE).is_file()


def master_weights(folder: Path, place: str) -> dict[str, torch.Tensor]:
    """The trained weights in a checkpoint, by number; none of a model that ranks wrote.

    `place` is "." for the policy's optimizer and "critic" for that of the critic.
    """
    path = folder / place / _TENSORS / "master" / "whole.safetensors"
    return load_file(path) if path.is_file() else {}


KEPT = "kept"
_NAME = re.compile(r"step-[0-9]{6,}")


def step_folder(root: Path, step: int) -> Path:
    return root / f"step-{step:06d}"


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def is_due(step: int, total: int, checkpoint_every: int, keep: KeepSection) -> bool:
    """Whether the number of steps asks for a checkpoint after `step`.

    Not after the last: what counts then is the stage's own artifact.
    """
    periods = (checkpoint_every, keep.every)
    return step < total and any(every and step % every == 0 for every in periods)


TIME_SHARE = 20
"""A checkpoint is due by time at the earliest after this many times what writing the last took."""


class Checkpoints:
    """Which steps of a stage that runs have a checkpoint, by number, by time, or since it is asked
    for, and where.

    None of them changes a result: a stage that is interrupted goes on from any of them alike.
    """

    def __init__(
        self,
        root: Path,
        total: int,
        checkpoint_every: int,
        keep: KeepSection,
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        asked: Callable[[], bool] = lambda: False,
    ) -> None:
        self._asked = asked
        self._root, self._total, self._every, self._keep = root, total, checkpoint_every, keep
        self._warn, self._clock = warn, clock
        self._wait_s = 60.0 * keep.checkpoint_minutes
        self._last = clock()

    def is_due(self, step: int) -> bool:
        """Whether there is to be a checkpoint after `step`."""
        late = bool(self._wait_s) and self._clock() - self._last >= self._wait_s
        return self._by_number(step) or (step < self._total and (late or self._asked()))

    def _by_number(self, step: int) -> bool:
        return is_due(step, self._total, self._every, self._keep)

    def write(self, step: int, save: Callable[[Path], None]) -> Path | None:
        """Let `save` write the checkpoint of `step` into a folder, then drop older ones.

        None where the disk has no room for one that only the time asked for, or the store that
        ranks write to is away: training goes on.
        """
        began, folder = self._clock(), step_folder(self._root, step)
        written: Path | None = folder
        try:
            save(folder)
        except StoreAway as error:  # ranks put their pieces there
            shutil.rmtree(_partial(folder), ignore_errors=True)
            self._warn(f"no checkpoint after step {step}, and training goes on: {error}")
            written = None
        except (OSError, SafetensorError) as error:
            if self._by_number(step) or "no space left" not in str(error).lower():
                raise
            shutil.rmtree(_partial(folder), ignore_errors=True)
            self._warn(
                f"the disk has no room for a checkpoint after step {step} in {self._root}: "
                "training goes on without; free some space, or set keep.checkpoint_minutes: 0"
            )
            written = None
        else:
            trim(self._root, self._keep)
        self._last = self._clock()
        if self._wait_s:
            took = self._last - began
            self._wait_s = max(60.0 * self._keep.checkpoint_minutes, TIME_SHARE * took)
        return written


def kept_checkpoints(total: int, keep: KeepSection) -> int:
    return max(0, total - 1) // keep.every if keep.every else 0


def complete_checkpoints(root: Path) -> list[Path]:
    """The checkpoints below `root`, newest first; those that a kill cut short are none."""
    found = [
        path for path in root.glob("step-*") if _NAME.fullmatch(path.name) and is_complete(path)
    ]
    return sorted(found, key=lambda path: path.name, reverse=True)


def newest_whole(root: Path, warn: Callable[[str], None]) -> Path | None:
    """The newest checkpoint whose files are those that were written; None where there is none.

    A damaged one with another before it is moved aside, with a warning. Raises `DamagedCheckpoint`
    when none is whole: a stage never starts again unasked.
    """
    candidates = complete_checkpoints(root)
    damaged: list[tuple[Path, DamagedCheckpoint]] = []
    for folder in candidates:
        try:
            check_whole(folder)
        except DamagedCheckpoint as error:
            damaged.append((folder, error))
            continue
        for bad, _ in damaged:
            aside = bad.with_name(f"damaged-{bad.name}")
            shutil.rmtree(aside, ignore_errors=True)
            bad.rename(aside)
            warn(
                f"checkpoint '{bad}' is damaged and was moved to '{aside.name}': continues after "
                f"step {step_of(folder)} instead of {step_of(bad)}"
            )
        return folder
    if damaged:
        raise damaged[0][1]
    return None


def trim(root: Path, keep: KeepSection) -> None:
    """Remove checkpoints that are neither among the newest nor kept for replay."""
    for folder in complete_checkpoints(root)[keep.checkpoints :]:
        if not _stays(folder, keep):
            shutil.rmtree(folder, ignore_errors=True)


def settle(root: Path, keep: KeepSection, extra: tuple[str, ...] = ()) -> None:
    """After the stage is done: what stays for replay moves to `kept/`, all else is removed."""
    kept = root / KEPT
    staying = [folder for folder in complete_checkpoints(root) if _stays(folder, keep)]
    for folder in staying:
        kept.mkdir(exist_ok=True)
        shutil.rmtree(kept / folder.name, ignore_errors=True)
        folder.rename(kept / folder.name)
    if not kept.is_dir():
        shutil.rmtree(root, ignore_errors=True)
        return
    for path in root.iterdir():
        if path.name in extra:
            path.replace(kept / path.name)
        elif path.is_dir() and path.name != KEPT:
            shutil.rmtree(path, ignore_errors=True)
        elif path.is_file():
            path.unlink()


def starting_points(root: Path) -> list[Path]:
    found = [*complete_checkpoints(root), *complete_checkpoints(root / KEPT)]
    return sorted(found, key=lambda path: path.name, reverse=True)


def _stays(folder: Path, keep: KeepSection) -> bool:
    return keep.every > 0 and step_of(folder) % keep.every == 0
