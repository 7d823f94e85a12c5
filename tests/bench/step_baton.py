"""Whose turn it is: a contestant of `step.py` waits here before each of its steps.

The bench imports it, and so does each contestant's process.
"""

from __future__ import annotations

import os
import select
from pathlib import Path

ENVIRONMENT = "POSTTRAIN_BENCH_BATON"  # the folder of this contestant's two pipes
READY, GO = "ready", "go"


class Baton:
    """The contestant's end: says that a step is over and waits for the word to begin the next."""

    def __init__(self, folder: Path | None = None) -> None:
        folder = folder or Path(os.environ[ENVIRONMENT])
        self._ready = (folder / READY).open("w")
        self._go = (folder / GO).open()

    def wait(self) -> None:
        """Return when it is this contestant's turn; exit when the bench is over."""
        self._ready.write("\n")
        self._ready.flush()
        if not self._go.readline():
            raise SystemExit("the benchmark is over")


class Contestant:
    """The bench's end of the two pipes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        for name in (READY, GO):
            os.mkfifo(folder / name)

    def connect(self) -> None:
        """Blocks until the contestant's process has opened its ends."""
        self._ready = (self.folder / READY).open()
        self._go = (self.folder / GO).open("w")

    def is_ready(self, limit: float | None = None) -> bool:
        """Wait until its step is over; False if its process ended. TimeoutError after `limit` s."""
        if not select.select([self._ready], [], [], limit)[0]:
            raise TimeoutError
        return bool(self._ready.readline())

    def go(self) -> None:
        """Let it take a step."""
        self._go.write("\n")
        self._go.flush()
