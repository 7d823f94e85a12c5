"""A rank's end: joins the process group that torchrun describes, and answers calls."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from posttrain.core.distributed.launch import SOCKET, STORE
from posttrain.core.distributed.messages import receive, send
from posttrain.core.errors import PosttrainError, RunError
from posttrain.core.serving.guard import PR_SET_PDEATHSIG

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
        except Exception as error:
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
