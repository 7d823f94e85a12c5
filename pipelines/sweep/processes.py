"""The processes of this machine that run a sweep's branches."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from posttrain.pipelines.sweep.places import STOP_S, BranchRequest, Messages, Place

WORKER = "posttrain.pipelines.sweep.worker"


class Processes:
    """`count` processes of this machine, which have their logs in `folder`.

    With several each has its share of the cores.
    """

    def __init__(self, home: Path, folder: Path, count: int) -> None:
        self.most, self._home, self._folder = count, home, folder
        self._threads = max(1, (os.cpu_count() or 1) // count) if count > 1 else 0
        self._logs = [folder / f"worker-{number}.log" for number in range(1, count + 1)]

    def open(self, messages: Messages) -> Place:
        """As in `Placement`."""
        log = self._logs.pop(0)
        self._logs.append(log)
        return ProcessPlace(self._home, log, self._threads, messages)

    def close(self) -> None:
        """As in `Placement`."""


class ProcessPlace(Place):
    """One process; it stays for the whole sweep."""

    def __init__(self, home: Path, log: Path, threads: int, messages: Messages) -> None:
        super().__init__(messages)
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = dict(os.environ)
        if threads:
            environment.setdefault("OMP_NUM_THREADS", str(threads))
        with log.open("a") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-m", WORKER, str(home)],
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
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.messages.put((self, json.loads(line)))
        self.process.wait()
        self.messages.put((self, None))

    def begin(self, request: BranchRequest) -> None:
        """As in `Place`."""
        self._send({"do": "run", **request.model_dump(mode="json")})

    def stop_run(self) -> None:
        """As in `Place`."""
        if self.branch is not None:
            self._send({"do": "stop", "key": self.branch.key})

    def _send(self, command: dict[str, object]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: the reader says so

    def interrupt(self) -> None:
        """As in `Place`."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass

    def end(self) -> None:
        """As in `Place`."""
        self.interrupt()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """As in `Place`, with all that it started."""
        if self.process.poll() is not None:
            return
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def how_it_ended(self) -> str:
        """As in `Place`."""
        code = self.process.returncode
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"its process ended ({how}); what it printed is in {self.log}"
