"""A worker: builds the pool's rewards, then scores what it is sent, one sample at a time."""

from __future__ import annotations

import ctypes
import os
import pickle
import resource
import signal
import socket
import sys
import time
from typing import Any

from posttrain.core.contracts import Reward, RewardContext
from posttrain.core.rewards.checking import one_line, only_score
from posttrain.core.rewards.protocol import Closed, Job, message, read_frame, score_fields
from posttrain.core.rewards.spec import PoolSetup
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
        rewards = [spec.build(context) for spec in setup.rewards]
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
