"""What is wrong with the cluster, or is about to be: a head that is gone, nodes that will leave.

Ray says neither to a process that only waits: one whose head is gone waits for a minute, and is
then ended by Ray in the middle of whatever it does.
"""

from __future__ import annotations

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
        self.head_gone = False
        self.asked = 0.0
        self.draining: frozenset[str] = frozenset()
        self.ours: dict[int, frozenset[str]] = {}


_watch = _Watch()


def forget() -> None:
    """Begin anew: the process has left the cluster."""
    _watch.__init__()  # type: ignore[misc]


def head_gone() -> bool:
    """Whether `require_head` has found so: nothing may be asked of the cluster then."""
    return _watch.head_gone


def require_head(wait: bool = False) -> None:
    """Raise `ResourceError` where the head is gone; it is asked once a second at most.

    With `wait` the answer counts now: a head that does not answer is waited for.
    """
    while not _head_is_there(wait):
        if not wait:
            return
        time.sleep(LOOK_S)


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
            _watch.head_gone = True
            raise ResourceError(
                f"the head of the Ray cluster at {head} has not answered for {HEAD_S:g} s "
                f"({error}): it was ended, or the way to it was cut. Start the cluster again; the "
                "same command then goes on from the last checkpoint"
            ) from error
        return False
    _watch.answered = time.monotonic()
    return True


def draining() -> frozenset[str]:
    """The nodes, by their ids, that were told to leave; asked once a second at most."""
    if time.monotonic() - _watch.asked >= LOOK_S:
        require_head(wait=True)
        _watch.draining = frozenset(state.get_draining_nodes())
        _watch.asked = time.monotonic()
    return _watch.draining


def hold(owner: object, node_ids: Iterable[str]) -> None:
    """`owner` has something on these nodes; on none any more where there are none."""
    _watch.ours[id(owner)] = frozenset(node_ids)


def leaving() -> list[str]:
    """Which nodes that hold something of this process's were told to leave."""
    if not ray.is_initialized() or not any(_watch.ours.values()):
        return []
    return sorted(draining() & frozenset().union(*_watch.ours.values()))
