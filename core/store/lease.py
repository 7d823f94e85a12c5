"""A lease on a name in a store with a URL: one holder among all machines, while it is renewed.

Nobody compares clocks: who waits takes over a lease that has not changed for as long as a lease
lasts by its own clock. A holder that cannot renew goes on, and says so when it has lost it; two may
then compute the same stage, of which the store keeps one result, whole.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from posttrain.core.errors import ResourceError
from posttrain.core.runtime.processes import Owner, is_left_behind, owner
from posttrain.core.store.remote import Remote, StoreAway

LEASE_VARIABLE = "POSTTRAIN_LEASE_S"
LEASE_S = 60.0
"""How long a lease lasts that is not renewed: a machine that is gone holds its stage that long."""
LOOK_AGAIN_S = 1.0
POLL_S = 0.2


def lease_seconds() -> float:
    """What the environment says, if it is a number of seconds."""
    try:
        return max(1.0, float(os.environ.get(LEASE_VARIABLE, "")))
    except ValueError:
        return LEASE_S


@contextmanager
def leased(
    remote: Remote,
    key: str,
    *,
    waits: Callable[[str], None],
    check: Callable[[], None],
    note: Callable[[str], None],
) -> Iterator[None]:
    """Hold the lease `key`; `waits` is given its holder once, `check` may raise to give up.

    Without a store that answers it is not held, and `note` is given that sentence.
    """
    lease = _Lease(remote, key, note)
    try:
        lease.take(waits, check)
    except StoreAway as error:
        note(f"{error}: {key.rpartition('/')[2]} is computed without keeping others from it")
        yield
        return
    try:
        yield
    finally:
        lease.release()


class _Lease:
    def __init__(self, remote: Remote, key: str, note: Callable[[str], None]) -> None:
        self._remote, self._key, self._note = remote, key, note
        self._lasts = lease_seconds()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._version = ""

    def take(self, waits: Callable[[str], None], check: Callable[[], None]) -> None:
        seen, since, reported = "", time.monotonic(), False
        while True:
            body = self._body()
            if self._remote.create(self._key, body) or self._remote.get(self._key) == body:
                break  # there it is, though the answer was lost
            found = self._remote.version(self._key)
            if found != seen:
                seen, since = found, time.monotonic()
            holder = self._holder()
            expired = time.monotonic() - since > self._lasts or is_left_behind(holder)
            if found and expired and self._remote.replace(self._key, self._body(), found):
                break
            if holder and not reported:
                waits(_named(holder))
                reported = True
            until = time.monotonic() + LOOK_AGAIN_S
            while time.monotonic() < until:
                check()
                time.sleep(POLL_S)
        self._version = self._remote.version(self._key)
        self._thread = threading.Thread(target=self._renew, name="posttrain-lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        self._over.set()
        assert self._thread is not None
        self._thread.join(5.0)
        try:
            if self._version and self._remote.version(self._key) == self._version:
                self._remote.remove([self._key])
        except ResourceError:
            pass  # it expires

    def _renew(self) -> None:
        while not self._over.wait(self._lasts / 4):
            try:
                body = self._body()
                taken = self._remote.replace(self._key, body, self._version)
                if not taken and self._remote.get(self._key) != body:
                    self._lost()
                    return
                self._version = self._remote.version(self._key)
            except ResourceError:
                continue  # away or refused: the next time, perhaps

    def _lost(self) -> None:
        self._version = ""
        self._note(
            f"another machine took over {self._key.rpartition('/')[2]}, because this one had not "
            f"reached the store {self._remote.url} for {self._lasts:g} s: both compute it, and the "
            "store keeps one of the results, whole"
        )

    def _body(self) -> bytes:
        return json.dumps({"holder": owner(), "beat": uuid.uuid4().hex}).encode()

    def _holder(self) -> str:
        found = self._remote.get_json(self._key)
        return str(found.get("holder", "")) if isinstance(found, dict) else ""


def _named(holder: str) -> str:
    process = Owner.parse(holder)
    return "another machine" if process is None else f"process {process.pid} on {process.host}"
