"""Which checkpoints of a stage stay: the newest to resume from, every n-th to replay from.

While a stage runs, its folder has `step-000010` and so on. Once it is done, those that stay for
replay lie in `kept/`, where a stage that is computed again does not take them for its own.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from posttrain.core.config.sections import KeepSection
from posttrain.core.training.checkpoint import DamagedCheckpoint, check_whole, is_complete

KEPT = "kept"


def step_folder(root: Path, step: int) -> Path:
    return root / f"step-{step:06d}"


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def is_due(step: int, total: int, checkpoint_every: int, keep: KeepSection) -> bool:
    """Whether there is a checkpoint after `step`.

    Not after the last: what counts then is the stage's own artifact.
    """
    periods = (checkpoint_every, keep.every)
    return step < total and any(every and step % every == 0 for every in periods)


def kept_checkpoints(total: int, keep: KeepSection) -> int:
    return max(0, total - 1) // keep.every if keep.every else 0


def complete_checkpoints(root: Path) -> list[Path]:
    """The checkpoints below `root`, newest first; those that a kill cut short are none."""
    found = [path for path in root.glob("step-*") if is_complete(path)]
    return sorted(found, key=lambda path: path.name, reverse=True)


def newest_checkpoint(root: Path) -> Path | None:
    """The newest checkpoint below `root`, if any, whether its files are whole or not."""
    return next(iter(complete_checkpoints(root)), None)


def newest_whole(root: Path, warn: Callable[[str], None]) -> Path | None:
    """The newest checkpoint whose files are those that were written; None where there is none.

    A damaged one with another before it is moved aside, with a warning. Raises `DamagedCheckpoint`
    when none is whole: a stage never starts anew unasked.
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


def settle(root: Path, keep: KeepSection, beside: tuple[str, ...] = ()) -> None:
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
        if path.name in beside:
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
