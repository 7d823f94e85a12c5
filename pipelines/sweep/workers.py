"""The processes that run a sweep's branches, as the sweep sees them."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.pipelines.sweep.branches import Branch

STOP_S = 60.0
"""What a run has to end at its next safe point, before its process is ended."""
Json = dict[str, Any]  # Any: JSON
Messages = queue.SimpleQueue[tuple["Worker", Json | None]]


class Worker:
    """One process; what it says goes to `messages`, None when it has ended."""

    def __init__(self, home: Path, log: Path, threads: int, messages: Messages) -> None:
        self.branch: Branch | None = None
        self.pending: set[str] = set()
        """Stages of its branch that are not done yet."""
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = dict(os.environ)
        if threads:
            environment.setdefault("OMP_NUM_THREADS", str(threads))
        with log.open("a") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "posttrain.pipelines.sweep.worker", str(home)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
                env=environment
                | {
                    "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
                    "PYTHONSAFEPATH": "1",
                },
                start_new_session=True,  # Ctrl-C in a terminal is for the sweep, which passes it on
            )
        reader = threading.Thread(target=self._read, args=(messages,), daemon=True)
        reader.start()

    def _read(self, messages: Messages) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            messages.put((self, json.loads(line)))
        self.process.wait()
        messages.put((self, None))

    def run(
        self,
        branch: Branch,
        configs: Sequence[Path | Mapping[str, object]],
        home: Path,
        store: str,
        tags: Mapping[str, str],
    ) -> None:
        """Begin with a branch."""
        self.branch, self.pending = branch, set(branch.stages.values())
        self._send(
            do="run",
            key=branch.key,
            configs=[str(each) if isinstance(each, Path) else each for each in configs],
            overrides=list(branch.overrides),
            home=str(home),
            store=store,
            tags=dict(tags),
        )

    def stop_run(self) -> None:
        """End its run at the next safe point; the process stays."""
        if self.branch is not None:
            self._send(do="stop", key=self.branch.key)

    def _send(self, **command: object) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(command, default=str) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: the reader says so

    def interrupt(self) -> None:
        """As Ctrl-C does: its run ends at the next safe point, and the process with it."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass

    def end(self, seconds: float = STOP_S) -> None:
        """Wait for its end, and end it with all that it started where that does not come."""
        self.interrupt()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End it at once, with all that it started."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def how_it_ended(self) -> str:
        """In words, for a branch that it was at."""
        code = self.process.returncode
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"its process ended ({how}); what it printed is in {self.log}"
