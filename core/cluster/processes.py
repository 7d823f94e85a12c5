"""Ranks as processes of this machine, started by torchrun and called through a socket.

Not `Connection.send`, to which torch has added the sharing of tensors by file descriptor.

The caller is not a rank itself: an engine in its process may have a process group of its own. Calls
and answers are pickled and go through a Unix socket in a folder that only this user can enter, so
each end reads only what the other wrote. Nothing listens on any other address than loopback.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from posttrain.core.cluster.group import Answer, Answerer, Build, RankLost, first_cause
from posttrain.core.cluster.messages import decode, encode
from posttrain.core.redaction import redact_output
from posttrain.core.runtime.process_guard import die_with_parent
from posttrain.core.runtime.processes import ServerProcess
from posttrain.core.runtime.startup import bounded_waiting, is_used, preloaded


def send(connection: Connection, value: object) -> None:
    connection.send_bytes(encode(value))


def receive(connection: Connection) -> Any:  # Any: pickled
    return decode(connection.recv_bytes())


START_LIMIT_S = 180.0
POLL_S = 0.2
SOCKET, STORE = "calls.sock", "store"


class RankProcesses:
    """A `RankGroup` of `size` ranks that run the module `worker`.

    They end with this process, however it ends. `folder` is one that they see too.
    """

    def __init__(self, size: int, worker: str, env: Mapping[str, str]) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="posttrain-ranks-")
        folder = Path(self._folder.name)
        self.folder: Path | None = folder
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / SOCKET))
        self._listener.listen(size)
        self._listener.settimeout(POLL_S)
        self._connections: dict[int, Connection] = {}
        command = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", "1", "--nproc-per-node", str(size), "--local-addr", "127.0.0.1"),
            # Ranks meet in a file: torchrun's own store would listen on every address.
            *("--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file"),
            *("--rdzv-endpoint", str(folder / "rendezvous"), "--rdzv-id", "posttrain"),
            *("-m", worker, str(folder)),
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
            folder / "log.txt",
        )

    def start(self, setup: object, check: Callable[[], None]) -> None:
        """As in `RankGroup`."""
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
        """As in `RankGroup`."""
        return self._ask((method, args), check)

    def _ask(self, message: object, check: Callable[[], None]) -> Any:  # Any: as above
        for connection in self._connections.values():
            try:
                send(connection, message)
            except OSError as error:
                raise self._lost("ended") from error
        answer: Any = None
        waiting = dict(self._connections)
        failures: list[Exception] = []
        while waiting:
            check()
            ready = wait(list(waiting.values()), timeout=POLL_S)
            if failures and not ready:
                break
            for rank in [rank for rank, connection in waiting.items() if connection in ready]:
                try:
                    found: Answer = receive(waiting.pop(rank))
                except (EOFError, OSError) as gone:
                    raise self._lost("ended") from gone
                failures += [found[0]] if found[0] is not None else []
                answer = found[1] if rank == 0 else answer
        if failures:
            self.close()  # the other ranks wait in vain for the one that failed
            raise first_cause(failures)
        return answer

    def _lost(self, what: str) -> RankLost:
        """The error to raise for ranks that are gone."""
        tail = self._process.log_tail()
        self.close()
        return RankLost(
            f"the learner's ranks {what}; killed for memory, perhaps: each needs its share of the "
            f"weights and the activations of a micro-batch. The end of their log:\n{tail}"
        )

    def close(self) -> None:
        """As in `RankGroup`."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._listener.close()
        self._process.stop()
        self._folder.cleanup()


def serve(folder: Path, build: Build) -> None:
    """Answer calls to the methods that `build` makes of the setup, until the caller is gone."""
    die_with_parent()  # torchrun: a rank has a session of its own
    redact_output()
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
    answerer = Answerer(build, rank)
    while True:
        try:
            message = receive(connection)
        except EOFError:
            break
        answer = answerer.answer(message)
        send(connection, answer)
        if answer[0] is not None:
            break
    # Not `destroy_process_group`, which waits for ranks that an error has ended.
    connection.close()
    os._exit(0)
