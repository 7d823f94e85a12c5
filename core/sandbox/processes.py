"""All processes of one sandbox, as the guard sees them: how much they hold, and their end."""

from __future__ import annotations

import os
import signal
import time

from posttrain.core.sandbox.confine import drop_to

_PAGE = os.sysconf("SC_PAGE_SIZE")
_GIVE_UP_S = 5.0


class Tree:
    """Descendants of this process. With `uid`, which nothing else has, killing is one call."""

    def __init__(self, uid: int | None) -> None:
        self.uid = uid
        self.left = 0

    def members(self) -> list[int]:
        found: list[int] = []
        waiting = [os.getpid()]
        while waiting:
            pid = waiting.pop()
            try:
                for task in os.listdir(f"/proc/{pid}/task"):
                    with open(f"/proc/{pid}/task/{task}/children") as file:
                        waiting += map(int, file.read().split())
            except (FileNotFoundError, ProcessLookupError):  # it has ended
                continue
            found.append(pid)
        return found[1:]

    def resident_bytes(self) -> int:
        """Sum of resident memory; pages that are shared count once for each process."""
        pages = 0
        for pid in self.members():
            try:
                with open(f"/proc/{pid}/statm") as file:
                    pages += int(file.read().split()[1])
            except (FileNotFoundError, ProcessLookupError):  # as above
                continue
        return pages * _PAGE

    def kill(self, child: int) -> int | None:
        """Kill and reap all; the wait status of `child`. `left` counts what would not die."""
        status: int | None = None
        limit = time.monotonic() + _GIVE_UP_S
        while True:
            try:
                pid, how = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self.left = 0
                return status
            if pid == child:
                status = how
            elif pid == 0:
                if time.monotonic() > limit:
                    self.left = len(self.members())
                    return status
                self._strike()
                time.sleep(0.001)

    def _strike(self) -> None:
        if self.uid is not None:
            self._strike_uid(self.uid)
            return
        # A stopped process cannot fork while the others are looked for.
        seen: set[int] = set()
        while new := set(self.members()) - seen:
            seen |= new
            for pid in new:
                _send(pid, signal.SIGSTOP)
        for pid in seen:
            _send(pid, signal.SIGKILL)

    def _strike_uid(self, uid: int) -> None:
        helper = os.fork()
        if helper == 0:
            try:
                drop_to(uid)
                os.kill(-1, signal.SIGKILL)  # all of this uid but the caller itself
            except OSError:  # none is left
                pass
            finally:
                os._exit(0)
        os.waitpid(helper, 0)


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:  # it has ended
        pass
