"""Locks between processes: one holder, waiting ones are reported, the dead let go."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.core.errors import ResourceError
from posttrain.core.store.locks import locked

HOLD = """
import sys, time
from pathlib import Path
from posttrain.core.store.locks import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(300)
"""


class GivenUp(Exception):
    """Raised by a waiting caller."""


def holder(path: Path) -> subprocess.Popen[str]:
    """A process that holds `path`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_who_waits_is_told_of_whom_once_and_may_give_up(tmp_path: Path) -> None:
    path, reported, looks = tmp_path / "lock", [], []

    def check() -> None:
        looks.append(1)
        if len(looks) == 3:
            raise GivenUp

    with holder(path) as process:
        with pytest.raises(GivenUp), locked(path, waits=reported.append, check=check):
            raise AssertionError("two hold it")
        assert reported == [f"process {process.pid}"]
        process.kill()
    with locked(path):
        assert path.read_text() == str(os.getpid())
    assert not path.exists(), "it leaves nothing behind"


COUNT = """
import sys
from pathlib import Path
from posttrain.core.store import locks

locks.LOOK_AGAIN_S = 0.0005
counter = Path(sys.argv[1]) / "count"
for _ in range(200):
    with locks.locked(Path(sys.argv[1]) / "lock"):
        number = int(counter.read_text())
        counter.write_text(str(number + 1))
"""


def test_many_that_take_turns_never_hold_it_together(tmp_path: Path) -> None:
    """The file goes with each of them, and comes with the next."""
    (tmp_path / "count").write_text("0")
    command = [sys.executable, "-c", COUNT, str(tmp_path)]
    started = [subprocess.Popen(command) for _ in range(4)]
    assert [process.wait(timeout=120) for process in started] == [0] * 4
    assert (tmp_path / "count").read_text() == "800"
    assert not (tmp_path / "lock").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="cannot write the lock file .*file/lock"):
        with locked(tmp_path / "file" / "lock"):
            pass
