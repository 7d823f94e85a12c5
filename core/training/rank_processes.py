"""The processes of a learner with several ranks, started by torchrun and called like an object.

Not `Connection.send`, to which torch has added the sharing of tensors by file descriptor.

The caller is not a rank itself: an engine in its process may have a process group of its own. Calls
and answers are pickled and go through a Unix socket in a folder that only this user can enter, so
each end reads only what the other wrote. Nothing listens on any other address than loopback.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from posttrain.core.errors import PosttrainError, RunError
from posttrain.core.runtime.process_guard import PR_SET_PDEATHSIG
from posttrain.core.runtime.processes import ServerProcess
from posttrain.core.runtime.startup import bounded_waiting, is_used, preloaded


def send(connection: Connection, value: object) -> None:
    connection.send_bytes(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))


def receive(connection: Connection) -> Any:  # Any: pickled
    return pickle.loads(connection.recv_bytes())  # noqa: S301 - from our own process


START_LIMIT_S = 180.0
POLL_S = 0.2
SOCKET, STORE = "calls.sock", "store"


class RankProcesses:
    """`size` ranks that run the module `worker`; they end with this process, however it ends."""

    def __init__(self, size: int, worker: str, env: Mapping[str, str]) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="posttrain-ranks-")
        self.folder = Path(self._folder.name)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.folder / SOCKET))
        self._listener.listen(size)
        self._listener.settimeout(POLL_S)
        self._connections: dict[int, Connection] = {}
        command = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", "1", "--nproc-per-node", str(size), "--local-addr", "127.0.0.1"),
            # Ranks meet in a file: torchrun's own store would listen on every address.
            *("--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file"),
            *("--rdzv-endpoint", str(self.folder / "rendezvous"), "--rdzv-id", "posttrain"),
            *("-m", worker, str(self.folder)),
        ]
        self._process = ServerProcess(
            command,
            {
                **os.environ,
                **(preloaded(os.environ) if is_used() else {}),
                **bounded_waiting(os.environ),
                **env,
                "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
                "PYTHONSAFEPATH": "1",
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
            },
            self.folder / "log.txt",
        )

    def start(self, setup: object, check: Callable[[], None]) -> None:
        """Wait until every rank is there, and give it `setup`. `check` raises to stop."""
        deadline = time.monotonic() + START_LIMIT_S
        while len(self._connections) < self.size:
            check()
            if self._process.exit_code is not None or time.monotonic() > deadline:
                raise self._lost("did not start")
            try:
                accepted, _ = self._listener.accept()
            except TimeoutError:
                continue
            accepted.setblocking(True)
            connection = Connection(accepted.detach())
            self._connections[int(receive(connection))] = connection
        self._listener.close()
        self._ask(setup, check)

    def call(self, method: str, *args: object, check: Callable[[], None]) -> Any:  # Any: pickled
        """What `method` of rank 0 returns, after it has been called on every rank."""
        return self._ask((method, args), check)

    def _ask(self, message: object, check: Callable[[], None]) -> Any:  # Any: as above
        for connection in self._connections.values():
            try:
                send(connection, message)
            except OSError as error:
                raise self._lost("ended") from error
        answer: Any = None
        waiting = dict(self._connections)
        failure: Exception | None = None
        while waiting:
            check()
            ready = wait(list(waiting.values()), timeout=POLL_S)
            if failure is not None and not ready:
                break
            for rank in [rank for rank, connection in waiting.items() if connection in ready]:
                try:
                    reported, value = receive(waiting.pop(rank))
                except (EOFError, OSError) as gone:
                    raise self._lost("ended") from gone
                failure = failure or reported
                answer = value if rank == 0 else answer
        if failure is not None:
            self.close()  # the other ranks wait in vain for the one that failed
            raise failure
        return answer

    def _lost(self, what: str) -> RunError:
        """The error to raise for ranks that are gone."""
        tail = self._process.log_tail()
        self.close()
        return RunError(
            f"the learner's ranks {what}; killed for memory, perhaps: each needs its share of the "
            f"weights and the activations of a micro-batch. The end of their log:\n{tail}"
        )

    def close(self) -> None:
        """End all ranks; may be called twice."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._listener.close()
        self._process.stop()
        self._folder.cleanup()


Methods = Mapping[str, Callable[..., Any]]  # Any: each method has its own arguments


def serve(folder: Path, build: Callable[[Any], Methods]) -> None:
    """Answer calls to the methods that `build` makes of the setup, until the caller is gone."""
    _die_with_torchrun()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with socket.socket(socket.AF_UNIX) as opened:
        opened.connect(str(folder / SOCKET))
        connection = Connection(opened.detach())
    send(connection, rank)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{folder / STORE}",
        rank=rank,
        world_size=size,
    )
    methods: Methods = {}
    while True:
        try:
            message = receive(connection)
        except EOFError:
            break
        try:
            if methods:
                method, args = message
                value = methods[method](*args)
            else:
                methods, value = build(message), None
        except Exception as error:  # whatever a method raises is the caller's to see
            traceback.print_exc()
            if not isinstance(error, PosttrainError):
                what = f"{type(error).__name__}: {error}"
                error = RunError(f"rank {rank} of the learner failed: {what}")
            send(connection, (error, None))
            break
        send(connection, (None, value if rank == 0 else None))
    # Not `destroy_process_group`, which waits for ranks that an error has ended.
    connection.close()
    os._exit(0)


def _die_with_torchrun() -> None:
    """Be killed when the process that started this one is: it has a session of its own."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
