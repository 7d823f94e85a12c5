"""Commands as processes that begin with the libraries already loaded.

Of the processor time of a `posttrain run` on a tiny model, more than half is the import of torch,
transformers and MLflow. Here one process imports them once and forks for each command; the child
goes on as `python -m posttrain.pipelines.cli` does. It loads Prefect, and what imports Prefect,
itself: Prefect reads its settings when it is imported.

What libraries read when they are loaded is right only in the environment of that moment: a command
for which a test sets such variables has an interpreter of its own. PYTHONPATH is that of what is
loaded from then on, plugins for example, without `sitecustomize`. The seed of hashes is the same in
all children: where a test compares bits of two runs, one of the two should have its own
interpreter, as those have that are killed.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from posttrain.core.runtime import startup

MODULE = "posttrain.pipelines.cli"
LOADED = (
    "posttrain.plugins.engines.transformers",
    "posttrain.core.tracking.mlflow_tracker",
    "posttrain.core.tracking.lineage",
    "posttrain.core.training.sft",
    "posttrain.core.training.teacher_server",
    "posttrain.core.analysis.microscope",
    "posttrain.core.gateway.runner",
    "posttrain.core.rollout.live",
    "posttrain.core.rollout.streaming",
    "posttrain.core.rewards.scoring",
    "posttrain.core.training.learner",
    "posttrain.core.training.preference",
    "posttrain.core.training.process_reward",
    "posttrain.core.training.reward_model",
    "posttrain.core.training.teacher_pass",
    "posttrain.core.evaluation.sampled",
    "posttrain.core.analysis.dashboard",
    "posttrain.core.analysis.learning_curves",
    "posttrain.core.plugin_manager",
    "posttrain.pipelines.cli.main",
    "transformers.models.llama.modeling_llama",
    # Prefect's and the commands' own.
    *("amplitude", "fsspec", "griffe", "httpcore", "humanize", "jsonschema", "pendulum"),
    *("prometheus_client", "pydantic_settings", "typer.rich_utils", "websockets.asyncio.client"),
)


class WarmCommands:
    """The process that forks, as tests see it; it ends with the process that made it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        chosen = environment.get(startup.CHOICE) != "system"
        self._preload = startup.preloaded(environment) if chosen else {}
        if self._preload:  # `startup.use_allocator` finds that it has been there
            self._preload[startup.BEFORE] = environment.get("LD_PRELOAD", "")
        self._busy = threading.Lock()
        atexit.register(self._close)
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), str(theirs.fileno())],
                env={**environment, **self._preload},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def run(
        self, arguments: Sequence[str], environment: Mapping[str, str], timeout: float
    ) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of `posttrain ARGUMENTS`, as subprocess.run gives them.

        What libraries read of the environment when they are loaded is what it was then.
        """
        variables = {**environment, **self._preload}
        with self._busy:
            readers, writers = zip(os.pipe(), os.pipe(), strict=True)
            try:
                request = json.dumps([str(Path.cwd()), variables, *arguments]).encode()
                socket.send_fds(self._ours, [request], list(writers))
                pid = self._answer()
            finally:
                for writer in writers:
                    os.close(writer)
            try:
                out, err = read_all(readers, timeout)
            except BaseException:
                os.kill(pid, signal.SIGKILL)
                self._answer()
                raise
            finally:
                for reader in readers:
                    os.close(reader)
            return self._answer(), out, err

    def is_busy(self) -> bool:
        """Whether another thread waits for its command."""
        return self._busy.locked()

    def _close(self) -> None:
        self._ours.shutdown(socket.SHUT_RDWR)  # also where a forked process still has it
        self._ours.close()
        self._process.wait(30)

    def _answer(self) -> int:
        answer = self._ours.recv(64)
        assert answer, "the process with the loaded libraries has ended"
        return int(answer)


def read_all(readers: Sequence[int], timeout: float) -> list[str]:
    """What is written to these pipes until all who could write have ended."""
    found: dict[int, list[bytes]] = {reader: [] for reader in readers}
    open_ones, ends = select.poll(), time.monotonic() + timeout  # `select` takes no file above 1023
    for reader in readers:
        open_ones.register(reader, select.POLLIN)
    left = len(found)
    while left:
        seconds = ends - time.monotonic()
        if seconds <= 0:
            raise subprocess.TimeoutExpired(MODULE, timeout)
        for reader, _ in open_ones.poll(1000 * seconds):
            if data := os.read(reader, 1 << 16):
                found[reader].append(data)
            else:
                open_ones.unregister(reader)
                left -= 1
    return [b"".join(parts).decode() for parts in found.values()]


def next_command(connection: socket.socket) -> tuple[str, dict[str, str], list[str]]:
    """Fork for each request; returns in the child: the folder, the variables, the arguments."""
    while True:
        data, files, _, _ = socket.recv_fds(connection, 1 << 20, 2)
        if not data:
            os._exit(0)  # without the words of libraries about what they find left
        if child := os.fork():
            for file in files:
                os.close(file)
            connection.send(str(child).encode())
            status = os.waitpid(child, 0)[1]
            connection.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        connection.close()
        for stream, file in enumerate(files, start=1):
            os.dup2(file, stream)
            os.close(file)
        folder, variables, *arguments = json.loads(data)
        return folder, variables, arguments


def main() -> None:
    """Load, wait for commands, and be one of them."""
    sys.path[0] = ""  # as with `python -m`, in place of the folder of this file
    startup.bound_waiting()
    for name in LOADED:
        importlib.import_module(name)
    importlib.import_module("posttrain.plugins").posttrain_register()  # loads all built-in ones
    assert "prefect" not in sys.modules
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: it is for the tests
    folder, variables, arguments = next_command(socket.socket(fileno=int(sys.argv[1])))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    given = variables.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [folder, *(path for path in given if path and path not in sys.path)]
    sys.argv[1:] = arguments
    runpy._run_module_as_main(MODULE)  # type: ignore[attr-defined]  # what `-m` does


if __name__ == "__main__":
    main()
