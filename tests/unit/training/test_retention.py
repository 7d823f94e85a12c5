"""Which checkpoints stay, which one is continued from, and when all are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from torch import nn

from posttrain.core.config.sections import KeepSection, OptimizerSection
from posttrain.core.training.checkpoint import (
    Checkpoints,
    DamagedCheckpoint,
    LoopState,
    is_due,
    kept_checkpoints,
    newest_whole,
    save_checkpoint,
    settle,
    starting_points,
    step_folder,
    trim,
)
from posttrain.core.training.optim import MasterOptimizer


def save(root: Path, *steps: int) -> None:
    torch.manual_seed(0)
    optimizer = MasterOptimizer(nn.Linear(2, 2), OptimizerSection(), 10)
    for step in steps:
        save_checkpoint(step_folder(root, step), optimizer, LoopState(step, {}, []))


def damage(root: Path, step: int) -> None:
    path = next(step_folder(root, step).rglob("whole.safetensors"))
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def names(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*step-*"))


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        (KeepSection(), ["step-000005", "step-000006"]),
        (KeepSection(checkpoints=1), ["step-000006"]),
        (KeepSection(checkpoints=1, every=3), ["step-000003", "step-000006"]),
        (KeepSection(checkpoints=2, every=2), [f"step-00000{n}" for n in (2, 4, 5, 6)]),
    ],
    ids=str,
)
def test_the_newest_and_every_nth_stay(tmp_path: Path, keep: KeepSection, left: list[str]) -> None:
    for step in range(1, 7):
        save(tmp_path, step)
        trim(tmp_path, keep)
    assert names(tmp_path) == left


def test_when_a_stage_is_done_only_what_a_replay_starts_from_stays(tmp_path: Path) -> None:
    root = tmp_path / "rl"
    save(root, 2, 3, 4)
    (root / "record").mkdir()
    (root / "answers.json").write_text("kept")
    (root / "other.json").write_text("removed")
    for _ in range(2):  # killed in between, it is done again
        settle(root, KeepSection(every=2), extra=("answers.json",))
        assert names(root) == ["kept/step-000002", "kept/step-000004"]
        assert sorted(p.name for p in root.iterdir()) == ["kept"]
        assert (root / "kept" / "answers.json").read_text() == "kept"
    assert newest_whole(root, pytest.fail) is None, "a stage computed again starts again"
    assert [path.name for path in starting_points(root)] == ["step-000004", "step-000002"]


def test_by_default_nothing_stays(tmp_path: Path) -> None:
    save(tmp_path / "rl", 1, 2)
    settle(tmp_path / "rl", KeepSection())
    assert not (tmp_path / "rl").exists()


def test_a_damaged_one_is_moved_aside_for_the_one_before_it(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    damage(tmp_path, 3)
    reported: list[str] = []
    found = newest_whole(tmp_path, reported.append)
    assert found == step_folder(tmp_path, 2)
    (warning,) = reported
    assert "continues after step 2 instead of 3" in warning
    # The steps it takes again must not be removed in favour of what is damaged.
    trim(tmp_path, KeepSection(checkpoints=1))
    assert names(tmp_path) == ["damaged-step-000003", "step-000002"]


def test_with_none_that_is_whole_it_is_refused_and_all_are_left(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    damage(tmp_path, 1)
    damage(tmp_path, 2)
    with pytest.raises(DamagedCheckpoint, match="step-000002.*damaged.*--fresh"):
        newest_whole(tmp_path, pytest.fail)
    assert names(tmp_path) == ["step-000001", "step-000002"]


def test_those_for_replay_are_written_beside_those_to_resume_from() -> None:
    keep = KeepSection(every=4)
    assert [n for n in range(1, 13) if is_due(n, 12, 3, keep)] == [3, 4, 6, 8, 9]
    assert [n for n in range(1, 13) if is_due(n, 12, 0, keep)] == [4, 8]
    assert not any(is_due(n, 12, 0, KeepSection()) for n in range(1, 13))
    assert kept_checkpoints(12, keep) == 2, "after the last step the result itself is kept"


class Clock:
    """A stage whose steps take a minute each, and whose checkpoints take `writing` minutes."""

    def __init__(self, root: Path, keep: KeepSection, every: int = 0, writing: float = 0.0) -> None:
        self.minutes, self.writing, self.root = 0.0, writing, root
        self.error: Exception | None = None
        self.warned: list[str] = []
        self.checkpoints = Checkpoints(
            root, 40, every, keep, self.warned.append, lambda: 60 * self.minutes
        )

    def save(self, folder: Path) -> None:
        self.minutes += self.writing
        partial = folder.with_name(f".partial-{folder.name}")
        partial.mkdir(parents=True)
        if self.error is not None:
            raise self.error
        partial.rmdir()
        save(self.root, int(folder.name[-6:]))

    def run(self, steps: int = 40) -> list[int]:
        written = []
        for step in range(1, steps + 1):
            self.minutes += 1
            if self.checkpoints.is_due(step) and self.checkpoints.write(step, self.save):
                written.append(step)
        return written


def test_by_default_a_checkpoint_is_written_every_ten_minutes_and_two_are_kept(
    tmp_path: Path,
) -> None:
    assert Clock(tmp_path, KeepSection()).run() == [10, 20, 30], "none after the last step"
    assert names(tmp_path) == ["step-000020", "step-000030"]


@pytest.mark.parametrize(
    ("keep", "every", "writing", "written"),
    [
        (KeepSection(checkpoint_minutes=0), 0, 0.0, []),
        (KeepSection(checkpoint_minutes=0), 16, 0.0, [16, 32]),
        (KeepSection(checkpoint_minutes=7), 0, 0.0, [7, 14, 21, 28, 35]),
        (KeepSection(), 7, 0.0, [7, 14, 21, 28, 35]),  # the time begins again with each of them
        (KeepSection(), 16, 0.0, [10, 16, 26, 32]),
        (KeepSection(), 0, 1.0, [10, 30]),  # a twentieth of the time at most
        (KeepSection(every=20), 0, 0.0, [10, 20, 30]),
    ],
    ids=str,
)
def test_time_and_number_of_steps_go_together(
    tmp_path: Path, keep: KeepSection, every: int, writing: float, written: list[int]
) -> None:
    assert Clock(tmp_path, keep, every, writing).run() == written


def test_one_that_is_asked_for_is_written_after_the_current_step(tmp_path: Path) -> None:
    asked: list[int] = []
    checkpoints = Checkpoints(tmp_path, 4, 0, KeepSection(), pytest.fail, asked=lambda: bool(asked))
    assert not checkpoints.is_due(2)
    asked.append(1)
    assert checkpoints.is_due(3)
    assert not checkpoints.is_due(4), "not after the last: the result itself is kept"


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), SafetensorError("I/O: No space left (28)")]
)
def test_without_room_for_what_only_the_time_asks_for_training_goes_on(
    tmp_path: Path, error: Exception
) -> None:
    clock = Clock(tmp_path, KeepSection())
    assert clock.run(12) == [10]
    clock.error = error
    assert clock.run(25) == []
    assert len(clock.warned) == 2 and "keep.checkpoint_minutes: 0" in clock.warned[0]
    assert names(tmp_path) == ["step-000010"], "nothing half-written, the older one stays"
    asked = Clock(tmp_path / "asked", KeepSection(), every=5)
    asked.error = error
    with pytest.raises(type(error)):
        asked.run()
    clock.error = OSError(5, "Input/output error")
    with pytest.raises(OSError, match="Input/output"):
        clock.run(25)
