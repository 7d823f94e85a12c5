"""The fork server that imports rewards once, and the workers that score.

The trainer itself must not fork: it has threads and gigabytes. This process has one thread. It is
the parent of every worker, so it alone can kill one with all its descendants and without a race:
a worker that ended is not reaped before its process group was killed, and since this process
adopts orphans, whatever left that group is found and killed too. When the trainer is gone, however
it went, the control socket ends and everything here is killed.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import resource
import select
import signal
import socket
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from posttrain.core.contracts import Reward, RewardContext
from posttrain.core.rewards.checking import one_line, only_score
from posttrain.core.rewards.protocol import (
    Closed,
    Frames,
    Job,
    PoolSetup,
    message,
    parse,
    read_frame,
    score_fields,
)
from posttrain.core.types import RewardSample, Score

_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded before the fork: each worker would pay for it
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def prctl(option: int, value: int) -> None:
    """Linux's `prctl`; elsewhere nothing."""
    if sys.platform == "linux":
        _LIBC.prctl(option, value, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of descendants that lost theirs, so that none of them gets away."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def isolate(server: int) -> None:
    """Settle as a worker of the fork server with this process id; exits when it is gone already."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)
    adopt_orphans()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # What a reward prints would mix with the run's own output, which may be JSON for a machine.
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    try:  # When memory runs out the kernel should take a worker, not the trainer.
        with open("/proc/self/oom_score_adj", "w") as stream:
            stream.write("1000")
    except OSError:
        pass


def work(sock: socket.socket, setup: PoolSetup, context: RewardContext | None) -> None:
    try:
        rewards = setup.build(context)
    except Exception as error:  # somebody else's code: the parent ends the run with this sentence
        sock.sendall(message(failed=one_line(error)))
        return
    sock.sendall(message(up=os.getpid()))
    while True:
        try:
            payload = read_frame(sock)
        except (Closed, OSError):
            return
        jobs: list[Job] = pickle.loads(payload)  # noqa: S301 - from the parent that started us
        sock.sendall(message(begin=time.monotonic()))
        for job in jobs:
            score = score_one(rewards[job.reward], job.sample)
            sock.sendall(message(job=job.number, score=score_fields(score), at=time.monotonic()))


def score_one(reward: Reward[Any], sample: RewardSample) -> Score:
    """The score of one sample; what the reward raises becomes an `error`, never a zero."""
    try:
        return only_score(reward.score([sample]))
    except BaseException as error:  # somebody else's code, which may even call sys.exit()
        return Score(None, "error", one_line(error))


_MAX_DESCRIPTORS = 16
_PARENT_CHECK_S = 1.0
_LAST_KILLS_S = 5.0


def main(descriptor: int, parent: int) -> None:
    """Serve the trainer with process id `parent` at the other end of a socket, until it closes."""
    control = socket.socket(fileno=descriptor)
    try:
        setup: PoolSetup = pickle.loads(read_frame(control))  # noqa: S301 - from our own parent
        context = setup.load()
    except Closed:
        return
    except Exception as error:  # somebody else's import: the parent ends the run with this
        control.sendall(message(failed=one_line(error)))
        return
    server = ForkServer(control, setup, context, parent)
    try:
        server.serve()
    finally:
        server.kill_all()


class ForkServer:
    """Forks workers on request, kills them, and tells how each one ended."""

    def __init__(
        self,
        control: socket.socket,
        setup: PoolSetup,
        context: RewardContext | None,
        parent: int,
    ) -> None:
        self._control, self._parent = control, parent
        self._setup, self._context = setup, context
        self._workers: dict[int, int] = {}  # process id -> the parent's number for it
        self._frames = Frames()
        self._descriptors: list[int] = []
        adopt_orphans()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, _leave)
        self._wakeup, wake = socket.socketpair()
        for end in (self._wakeup, wake):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        self._wake = wake
        self._own = _children()  # helpers that an import started, if any

    def serve(self) -> None:
        """Answer requests until the other end closes or the trainer is gone."""
        gc.collect()
        gc.freeze()  # so that a worker's collector does not copy every page of this process
        self._control.sendall(message(ready=True))
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._wakeup, select.POLLIN)
        while os.getppid() == self._parent:
            ready = {descriptor for descriptor, _ in poll.poll(1000 * _PARENT_CHECK_S)}
            if self._wakeup.fileno() in ready:
                self._wakeup.recv(4096)
            self.reap()
            if self._control.fileno() in ready and not self._answer():
                return

    def _answer(self) -> bool:
        """Carry out the requests that came; False when the other end closed."""
        data, descriptors, _, _ = socket.recv_fds(self._control, 1 << 16, _MAX_DESCRIPTORS)
        self._descriptors += descriptors
        if not data:
            return False
        for payload in self._frames.feed(data):
            request = parse(payload)
            if "spawn" in request:
                self._spawn(int(str(request["spawn"])), self._descriptors.pop(0))
            else:
                self._kill(int(str(request["kill"])))
        return True

    def _spawn(self, number: int, descriptor: int) -> None:
        server = os.getpid()
        pid = os.fork()
        if pid:
            os.close(descriptor)
            self._workers[pid] = number
            _own_group(pid)
            return
        try:
            _own_group(0)
            signal.set_wakeup_fd(-1)
            for end in (self._control, self._wakeup, self._wake):
                end.close()
            isolate(server)
            work(socket.socket(fileno=descriptor), self._setup, self._context)
        finally:
            os._exit(0)  # a forked child must not run what this process would do at its end

    def _kill(self, number: int) -> None:
        for pid, known in self._workers.items():
            if known == number:
                _kill_group(pid)

    def reap(self) -> None:
        """Collect everything that ended, kill what it left behind, and report workers."""
        while (ended := self._next_ended()) is not None:
            pid, status = ended
            self._own.discard(pid)
            number = self._workers.pop(pid, None)
            if number is not None:
                self._tell(ended=number, code=os.waitstatus_to_exitcode(status))
        for orphan in _children() - set(self._workers) - self._own:
            _signal(orphan, signal.SIGKILL)

    def _next_ended(self) -> tuple[int, int] | None:
        """Reap one child that has ended: its process id and status. Its group is killed first."""
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return None
        if found is None:
            return None
        if found.si_pid in self._workers:
            _kill_group(found.si_pid)
        return os.waitpid(found.si_pid, 0)

    def _tell(self, **fields: object) -> None:
        try:
            self._control.sendall(message(**fields))
        except OSError:  # the trainer is gone, which the next read of the control socket tells
            pass

    def kill_all(self) -> None:
        for pid in list(self._workers):
            _kill_group(pid)
        deadline = time.monotonic() + _LAST_KILLS_S
        while time.monotonic() < deadline:
            for pid in _children():
                _signal(pid, signal.SIGKILL)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            time.sleep(0.005)


def _leave(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(0)


def _own_group(pid: int) -> None:
    """Make `pid` (0 = this process) lead a group; both sides do, and the second finds it done."""
    try:
        os.setpgid(pid, pid)
    except OSError:
        pass


def _kill_group(pid: int) -> None:
    """Kill a process group whose leader, alive or not, has not been reaped."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except OSError:
        pass


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except OSError:
        pass


def _children() -> set[int]:
    """Process ids of this process's children, where /proc tells."""
    try:
        return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))
    except OSError:
        return set()
