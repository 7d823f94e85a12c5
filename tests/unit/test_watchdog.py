"""A hang ends with a message and the stacks; work, and waiting for a person, do not."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from posttrain.pipelines.run.stops import SIGNAL, Watchdog

HANG = """
import sys, time
from pathlib import Path
from posttrain.pipelines.run.stops import Stalled, Watchdog

def waits_for_ever():
    time.sleep(300)

def listens_to_nobody():
    while True:
        try:
            time.sleep(300)
        except Stalled:
            pass

with Watchdog(0.5, Path(sys.argv[1]), grace_s=0.5):
    try:
        globals()[sys.argv[2]]()
    except Stalled as error:
        print("caught:", error)
        sys.exit(7)
"""


@pytest.mark.parametrize(
    ("how", "code", "reported"),
    [("waits_for_ever", 7, "caught: "), ("listens_to_nobody", 1, "error: ")],
)
def test_a_hang_is_interrupted_or_else_the_process_ends(
    tmp_path: Path, how: str, code: int, reported: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANG, str(tmp_path), how], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code, done.stderr
    (stacks,) = tmp_path.glob("stacks-*.txt")
    assert f"in {how}" in stacks.read_text()
    text = done.stdout + done.stderr
    assert text.startswith(f"{reported}no sign of life for 0.00833333 min") and str(stacks) in text
    assert "limits.stall_minutes" in text


def test_signs_of_life_and_waiting_for_somebody_are_no_hang(tmp_path: Path) -> None:
    with Watchdog(0.4, tmp_path) as dog:
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            dog.sign()
            time.sleep(0.05)
        with dog.resting():
            time.sleep(1.0)
        time.sleep(0.1)
    assert not list(tmp_path.iterdir())


def test_without_a_limit_nothing_is_watched(tmp_path: Path) -> None:
    import signal

    before = signal.getsignal(SIGNAL)
    with Watchdog(0.0, tmp_path):
        assert signal.getsignal(SIGNAL) is before
        time.sleep(0.2)
    assert not list(tmp_path.iterdir())
