"""What is wrong with the cluster, or is about to be: a head that is gone, nodes that will leave.

Ray ends a process whose head is gone after a minute, in the middle of whatever it does, and one
whose own node is gone at its next access to the object store, with no word at all. Whoever asks
here before such an access gets an error instead.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterable

import ray
from ray._private.state import state

from posttrain.core.errors import ResourceError

PATIENCE = {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"}
"""What keeps Ray from ending a process that has noted the loss of the head and ends by itself."""
HEAD_S = 10.0
"""A head that has answered nothing for so long is gone."""
LOOK_S = 1.0
ANSWER_S = 2.0


class _Watch:
    """What was seen last, and which nodes hold something of this process's."""

    def __init__(self) -> None:
        self.looked = self.answered = 0.0
        self.gone = False
        self.store: socket.socket | None = None
        self.asked = 0.0
        self.draining: frozenset[str] = frozenset()
        self.ours: dict[int, frozenset[str]] = {}


_watch = _Watch()


def begin() -> None:
    """This process has joined: hold a connection to its node, which ends with the node."""
    forget()
    name = ray._private.worker.global_worker.node.plasma_store_socket_name
    opened = socket.socket(socket.AF_UNIX)
    try:
        opened.connect(name)
    except OSError:  # it is gone already, which the next call will show
        opened.close()
    else:
        _watch.store = opened


def forget() -> None:
    """The process has left the cluster."""
    global _watch
    if _watch.store is not None:
        _watch.store.close()
    _watch = _Watch()


def is_gone() -> bool:
    """Whether `require_cluster` has found so: nothing may be asked of the cluster then."""
    return _watch.gone


def require_cluster(wait: bool = False) -> None:
    """Raise `ResourceError` where the head or this process's own node is gone.

    The head is asked once a second at most. With `wait` the answer counts now: a head that does not
    answer is waited for.
    """
    if _watch.store is not None and select.select([_watch.store], [], [], 0)[0]:
        _watch.gone = True
        wait = True
    while not _head_is_there(wait):
        if not wait:
            return
        time.sleep(LOOK_S)
    if _watch.gone:
        raise ResourceError(
            "the Ray node of this machine has ended, and the run with it: start it again; the same "
            "command then goes on from the last checkpoint"
        )


def _head_is_there(now: bool) -> bool:
    began = time.monotonic()
    if not now and began - _watch.looked < LOOK_S:
        return True
    head = str(ray.get_runtime_context().gcs_address)
    host, _, port = head.rpartition(":")
    _watch.looked, before = began, _watch.looked
    try:
        socket.create_connection((host, int(port)), ANSWER_S).close()
    except OSError as error:
        # Who has not looked for long does not know when the head went.
        if not _watch.answered or began - before > HEAD_S:
            _watch.answered = began
        if began - _watch.answered >= HEAD_S:
            _watch.gone = True
            raise ResourceError(
                f"the head of the Ray cluster at {head} has not answered for {HEAD_S:g} s "
                f"({error}): it was ended, or the way to it was cut. Start the cluster again; the "
                "same command then goes on from the last checkpoint"
            ) from error
        return False
    _watch.answered = time.monotonic()
    return True


def draining() -> frozenset[str]:
    """The nodes, by their ids, that were asked to leave; asked once a second at most."""
    if time.monotonic() - _watch.asked >= LOOK_S:
        require_cluster(wait=True)
        _watch.draining = frozenset(state.get_draining_nodes())
        _watch.asked = time.monotonic()
    return _watch.draining


def hold(owner: object, node_ids: Iterable[str]) -> None:
    """`owner` has something on these nodes; on none any more where there are none."""
    _watch.ours[id(owner)] = frozenset(node_ids)


def leaving() -> list[str]:
    """Which nodes that hold something of this process's were asked to leave."""
    if not ray.is_initialized() or not any(_watch.ours.values()):
        return []
    return sorted(draining() & frozenset().union(*_watch.ours.values()))
