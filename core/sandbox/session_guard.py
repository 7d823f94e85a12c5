"""The guard of a long-lived sandbox: as `guard`, but for many commands. See `session`.

It passes requests on to `inside`, looks at the memory of what runs there, and kills all of it when
the socket to its parent is closed at the other end.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time

from posttrain.core.sandbox import kernel
from posttrain.core.sandbox.confine import Ends, become_program, limits_of, threads_of
from posttrain.core.sandbox.guard import Tree, make_folders, own_uid, remove_folder
from posttrain.core.sandbox.inside import Header, pack, unpack
from posttrain.core.sandbox.job import SCRATCH, Job, environment, load

NOT_KILLED = 3
"""Exit code of a guard that could not kill everything."""
_START_S = 60.0
_LATE_S = 2.0
_LOOK_S = 0.05
_IDLE_LOOK_S = 0.5


class _Gone(Exception):
    """The parent is gone, or has closed the session."""


class _Lost(Exception):
    """The first process inside has ended, or does not answer."""


class Guard:
    """The processes of a session, and the two ways to talk."""

    def __init__(self, parent: int) -> None:
        self.parent, self.data = parent, bytearray()
        self.tree = Tree(own_uid())
        self.child, self.kept = 0, frozenset[int]()
        self.folder = self.box = self.scratch = ""

    def serve(self) -> None:
        request, payload = self._request()
        self.job: Job = load(payload)
        if self.job.level == "rlimits":
            self.folder, self.box, self.scratch = make_folders(self.job, self.tree.uid)
        begin, files = self._request()
        self._start()
        self._answer(*self._begin(begin, files))
        while True:
            request, payload = self._request()
            try:
                self._answer(*self._ask(request, payload, request["wall_s"]))
            except _Lost as error:
                self.tree.kill(self.child)
                for descriptor in (self.inside, self.answers, self.report, self.ending):
                    os.close(descriptor)
                if self.job.level != "rlimits":
                    self._answer({"lost": str(error)})
                    return
                # Its files are a folder of the host: another first process finds them there.
                self._start()
                self._begin(begin, b"")
                self._answer({"killed": str(error)})

    def close(self) -> int:
        """Kill all, and remove what was written; the exit code."""
        if self.child:
            self.tree.kill(self.child)
        if self.folder:
            remove_folder(self.folder)
        return NOT_KILLED if self.tree.left else 0

    def _start(self) -> None:
        job, requests, answers, report = self.job, os.pipe(), os.pipe(), os.pipe()
        for descriptor in (requests[1], answers[0], report[0]):
            os.set_blocking(descriptor, False)
        self.child = os.fork()
        if self.child == 0:
            ends = Ends(requests[0], answers[1], report[1], report[1], report[1])
            become_program(job, self.tree.uid, ends, self.box, self.scratch)
        for descriptor in (requests[0], answers[1], report[1]):
            os.close(descriptor)
        self.inside, self.answers, self.report = requests[1], answers[0], report[0]
        self.ending = os.pidfd_open(self.child)
        self.kept = frozenset()

    def _begin(self, request: Header, files: bytes) -> tuple[Header, bytes]:
        """Tell the first process how to run commands; those that are there now are kept."""
        job = self.job
        limits = limits_of(job)
        own = 1  # the first process counts too
        if job.level == "rlimits" and self.tree.uid is None:
            own = threads_of(os.getuid())
        limits["RLIMIT_NPROC"] = (job.processes + own,) * 2
        header = {
            **request,
            "limits": limits,
            "environment": {**environment(self.scratch or SCRATCH), **request["env"]},
            "base": self.scratch or "/",
            "scratch": [self.scratch] if self.scratch else [SCRATCH, *job.folders],
        }
        try:
            answer = self._ask(header, files, _START_S)
        except _Lost as error:
            why = b""
            try:
                why = os.read(self.report, 1 << 12)
            except BlockingIOError:
                pass
            self._answer({"lost": f"{error}: {why.decode(errors='replace')[-300:].strip()}"})
            raise _Gone from error
        self.kept = frozenset(self.tree.members())
        return answer

    def _request(self) -> tuple[Header, bytes]:
        """The next one of the parent; until then, an eye on what runs in the background."""
        poll = select.poll()
        poll.register(self.parent, select.POLLIN)
        while (found := unpack(self.data)) is None:
            if not poll.poll(_IDLE_LOOK_S * 1000):
                self._look()
                continue
            part = os.read(self.parent, 1 << 20)
            if not part:
                raise _Gone
            self.data += part
        return found

    def _answer(self, header: Header, payload: bytes = b"") -> None:
        data = memoryview(pack(header, payload))
        try:
            while data:
                data = data[os.write(self.parent, data) :]
        except (BrokenPipeError, ConnectionResetError):
            raise _Gone from None

    def _ask(self, header: Header, payload: bytes, wall_s: float) -> tuple[Header, bytes]:
        """The answer from inside. Raises `_Lost` when there is none, `_Gone` without a parent."""
        out, data, killed = memoryview(pack(header, payload)), bytearray(), ""
        deadline = time.monotonic() + wall_s + _LATE_S
        look, struck = time.monotonic() + _LOOK_S, False
        poll = select.poll()
        poll.register(self.parent, 0)
        for descriptor in (self.ending, self.answers):
            poll.register(descriptor, select.POLLIN)
        poll.register(self.inside, select.POLLOUT)
        while (found := unpack(data)) is None:
            now = time.monotonic()
            if now >= deadline:
                if struck:
                    raise _Lost("it does not answer")
                self.tree.strike_all_but(self.kept)
                struck, deadline = True, now + _LATE_S
            if now >= look:
                killed = self._look() or killed
                look = now + _LOOK_S
            events = dict(poll.poll(max(1, int((min(look, deadline) - now) * 1000))))
            if self.parent in events:
                raise _Gone
            if events.get(self.inside, 0) & select.POLLOUT:
                try:
                    out = out[os.write(self.inside, out) :]
                except BrokenPipeError:
                    raise _Lost(killed or "all of its processes were killed") from None
                if not out:
                    poll.unregister(self.inside)
            if self.answers in events and (part := os.read(self.answers, 1 << 20)):
                data += part
            elif self.ending in events:
                raise _Lost(killed or "all of its processes were killed")
        if killed:
            found[0]["killed"] = killed
        return found

    def _look(self) -> str:
        """Kill what runs if it takes too much memory; why it was killed. Collect what has ended."""
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        if not self.kept:
            return ""
        if self.tree.resident_bytes(self.kept) <= self.job.memory_mib << 20:
            return ""
        self.tree.strike_all_but(self.kept)
        return "memory"


def main() -> None:
    """Serve the parent at the other end of the socket that the only argument names."""
    end = socket.socket(fileno=int(sys.argv[1]))
    end.set_inheritable(False)
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    guard = Guard(end.fileno())
    code = 1
    try:
        guard.serve()
    except _Gone:
        pass
    finally:
        code = guard.close()
        os._exit(code)
