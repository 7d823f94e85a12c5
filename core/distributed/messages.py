"""Messages between a run and its ranks: pickles, over a socket that only the two of them have.

Not `Connection.send`, to which torch has added the sharing of tensors by file descriptor.
"""

from __future__ import annotations

import pickle
from multiprocessing.connection import Connection
from typing import Any


def send(connection: Connection, value: object) -> None:
    connection.send_bytes(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))


def receive(connection: Connection) -> Any:  # Any: pickled
    return pickle.loads(connection.recv_bytes())  # noqa: S301 - from our own process
