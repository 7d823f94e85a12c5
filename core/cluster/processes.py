"""Ranks as processes of this machine, called through a socket.

The caller is not a rank itself: an engine in its process may have a process group of its own. Calls
and answers are pickled and go through a Unix socket in a folder that only this user can enter, so
each end reads only what the other wrote. Nothing listens on any other address than loopback: ranks
find each other through a file, and gloo is bound to that interface.

`python -m` this, with a module and the folder, is one rank.
"""

from __future__ import annotations

import importlib
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

from posttrain.core.cluster.group import Answer, Answerer, RankLost, first_cause
from posttrain.core.cluster.messages import decode, encode
from posttrain.core.redaction import redact_output
from posttrain.core.runtime.collector import loading
from posttrain.core.runtime.processes import ServerProcess
from posttrain.core.runtime.startup import bounded_waiting, is_used, preloaded


def send(connection: Connection, value: object) -> None:
    """Not `Connection.send`, to which torch has added the sharing of tensors by descriptor."""
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
        shared = {
            **os.environ,
            **(preloaded(os.environ) if is_used() else {}),
            **bounded_waiting(os.environ),
            **env,
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "PYTHONSAFEPATH": "1",
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
            "WORLD_SIZE": str(size),
        }
        command = [sys.executable, "-m", __name__, worker, str(folder)]
        self._processes = [
            ServerProcess(
                command,
                {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                folder / f"rank-{rank}.log",
            )
            for rank in range(size)
        ]

    def start(self, setup: object, check: Callable[[], None]) -> None:
        """As in `RankGroup`."""
        deadline = time.monotonic() + START_LIMIT_S
        while len(self._connections) < self.size:
            check()
            codes = [process.exit_code for process in self._processes]
            ended = [rank for rank, code in enumerate(codes) if code is not None]
            late = [rank for rank in range(self.size) if rank not in self._connections]
            if ended or time.monotonic() > deadline:
                raise self._lost("did not start", (ended + late)[0])
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
        for rank, connection in self._connections.items():
            try:
                send(connection, message)
            except OSError as error:
                raise self._lost("ended", rank) from error
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
                    raise self._lost("ended", rank) from gone
                failures += [found[0]] if found[0] is not None else []
                answer = found[1] if rank == 0 else answer
        if failures:
            self.close()  # the other ranks wait in vain for the one that failed
            raise first_cause(failures)
        return answer

    def _lost(self, what: str, rank: int) -> RankLost:
        """The error to raise for ranks that are gone, `rank` among them."""
        tail = self._processes[rank].log_tail()
        self.close()
        return RankLost(
            f"the learner's ranks {what}; killed for memory, perhaps: each needs its share of "
            "the weights and the activations of a micro-batch. The end of the log of "
            f"rank {rank}:\n{tail}"
        )

    def close(self) -> None:
        """As in `RankGroup`."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._listener.close()
        for process in self._processes:
            process.begin_stop()
        for process in self._processes:
            process.stop()
        self._folder.cleanup()


def main(worker: str, folder: Path) -> None:
    """Answer calls to the methods that `worker` builds of the setup, until the caller is gone."""
    redact_output()
    with loading():
        build = importlib.import_module(worker).build
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


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
