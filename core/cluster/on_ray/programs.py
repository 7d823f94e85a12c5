"""A program on a node of a Ray cluster: lines to its standard input, lines from its output."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from posttrain.core.cluster.on_ray.connection import first_line, note_loss
from posttrain.core.cluster.on_ray.placement import no_room
from posttrain.core.cluster.on_ray.watch import is_gone, require_cluster
from posttrain.core.errors import ResourceError, RunError

LOOK_S = 1.0
READ_S = 10.0
"""How long an actor waits for a line before it says that there is none yet."""
SPARE_S = 30.0
"""What a call may take on top of that."""


@dataclass(frozen=True, slots=True)
class Program:
    """`python -m MODULE ARGUMENTS`, where it runs if a node has that folder, and where its log is.

    `environment` is in addition to the node's.
    """

    module: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    log: Path


class ProgramActor:
    """Runs one program as its child. The end of its input, which ends with it, ends the program."""

    def __init__(self, path: Sequence[str]) -> None:
        sys.path.extend(folder for folder in path if folder not in sys.path)
        self._process: subprocess.Popen[str] | None = None
        self._lines: list[str] = []
        self._news = threading.Condition()
        self._ended = False

    async def start(self, program: Program) -> str:
        """Start it; returns the address of the node."""
        # Its own runs may join the cluster, and need nothing else of this actor's.
        own = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("RAY_") or name.startswith("RAY_AUTH")
        }
        found = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONSAFEPATH": "1"}
        program.log.parent.mkdir(parents=True, exist_ok=True)
        with program.log.open("a") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-m", program.module, *program.arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
                cwd=program.folder if program.folder.is_dir() else None,
                env={**own, **found, **program.environment},
                start_new_session=True,
            )
        threading.Thread(target=self._read, daemon=True).start()
        return str(ray.util.get_node_ip_address())

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            with self._news:
                self._lines.append(line)
                self._news.notify_all()
        self._process.wait()
        with self._news:
            self._ended = True
            self._news.notify_all()

    async def write(self, line: str) -> None:
        """Give it a line."""
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):  # it has ended: `read` says so
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    async def read(self) -> tuple[list[str], int | None]:
        """The lines that came, and its exit code once there are no more."""
        return await asyncio.to_thread(self._wait)

    def _wait(self) -> tuple[list[str], int | None]:
        assert self._process is not None
        with self._news:
            self._news.wait_for(lambda: bool(self._lines) or self._ended, READ_S)
            lines, self._lines = self._lines, []
        return lines, self._process.returncode if self._ended and not lines else None

    async def close(self) -> None:
        """The end of its input."""
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    async def kill(self) -> None:
        """End it at once, with all that it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


class NodeProgram:
    """A program behind an actor. Every wait ends, whatever becomes of the actor and its node.

    `bundle` is what it takes of its node, of CPU and GPU. The process must have joined a cluster.
    """

    def __init__(self, bundle: Mapping[str, float], start_timeout_s: float, fields: str) -> None:
        self.node = ""
        self._bundle, self._limit_s, self._fields = dict(bundle), start_timeout_s, fields
        path = [folder or os.getcwd() for folder in sys.path]
        self._actor: Any = (  # Any: Ray's handle
            ray.remote(ProgramActor)
            .options(
                num_cpus=bundle.get("CPU", 0.0),
                num_gpus=bundle.get("GPU", 0.0),
                max_restarts=0,
                scheduling_strategy="SPREAD",
            )
            .remote(path)
        )

    def start(self, program: Program) -> None:
        """Wait for its place, and start it.

        Raises `ResourceError` where no node has room for it within the time.
        """
        try:
            self.node = str(self._get(self._actor.start.remote(program), self._limit_s))
        except TimeoutError as error:
            raise no_room("a branch", self._bundle, self._limit_s, self._fields) from error

    def write(self, line: str) -> None:
        """Give it a line."""
        if not is_gone():
            self._actor.write.remote(line)

    def read(self) -> tuple[list[str], int | None]:
        """The lines that came, after a while none; its exit code where there will be no more."""
        try:
            lines, code = self._get(self._actor.read.remote(), READ_S + SPARE_S)
        except TimeoutError as error:
            raise RunError(f"node {self.node} did not answer for {SPARE_S:g} s") from error
        return lines, code

    def close(self) -> None:
        """The end of its input."""
        if not is_gone():
            self._actor.close.remote()

    def kill(self) -> None:
        """End it and its actor at once."""
        if is_gone() or not ray.is_initialized():
            return
        with contextlib.suppress(ResourceError, RunError, TimeoutError):
            self._get(self._actor.kill.remote(), LOOK_S)
        ray.kill(self._actor)

    def _get(self, reference: Any, limit_s: float) -> Any:  # Any: what the method gives
        until = time.monotonic() + limit_s
        while True:
            require_cluster()
            try:
                return ray.get(reference, timeout=LOOK_S)
            except ray.exceptions.GetTimeoutError as error:
                if time.monotonic() > until:
                    raise TimeoutError from error
            except ray.exceptions.RayTaskError as error:
                raise RunError(
                    f"{self.node or 'a node'}: {first_line(error.cause or error)}"
                ) from error
            except ray.exceptions.RayError as error:
                note_loss()
                raise RunError(
                    f"node {self.node or 'of the cluster'} or its process was lost: "
                    f"{first_line(error)}"
                ) from error
