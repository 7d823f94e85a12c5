"""How the pool, its fork server and its workers talk, and how a reward is described to them.

A frame is four bytes of length and its payload. What comes from a worker ran somebody else's code,
so the parent reads it as JSON, bounded in length, and never unpickles it.

A worker imports only the modules of the rewards it was given, by the parent's own `sys.path`: a
process that forks must not have threads.
"""

from __future__ import annotations

import json
import pickle
import select
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.core.contracts import Reward, RewardContext
from posttrain.core.contracts.spec import PluginSpec, spec_of
from posttrain.core.rewards.checking import checked_score, failed
from posttrain.core.types import RewardSample, Score, StepVerdict

_HEADER = struct.Struct(">I")
MAX_REPLY = 1 << 20
"""Bytes of one frame from a worker."""
SEND_LIMIT_S = 10.0
_CHUNK = 1 << 16


class BadFrame(Exception):
    """The other side sent what is not a frame of this protocol."""


class Closed(Exception):
    """The other side is gone, or takes nothing any more."""


@dataclass(frozen=True, slots=True)
class Job:
    """One sample for one reward; `reward` is its place in the pool's list."""

    number: int
    reward: int
    sample: RewardSample


def framed(payload: bytes) -> bytes:
    return _HEADER.pack(len(payload)) + payload


def message(**fields: object) -> bytes:
    return framed(json.dumps(fields).encode())


class Frames:
    def __init__(self, limit: int = MAX_REPLY) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        self._buffer += data
        found = []
        while len(self._buffer) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._buffer)
            if length > self._limit:
                raise BadFrame(f"a frame of {length} bytes, at most {self._limit} are allowed")
            end = _HEADER.size + length
            if len(self._buffer) < end:
                break
            found.append(bytes(self._buffer[_HEADER.size : end]))
            del self._buffer[:end]
        return found


def parse(payload: bytes) -> dict[str, object]:
    try:
        found = json.loads(payload)
    except ValueError as error:
        raise BadFrame("not JSON") from error
    if not isinstance(found, dict):
        raise BadFrame("not a JSON object")
    return found


def read_exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = sock.recv(min(_CHUNK, size - len(data)))
        if not part:
            raise Closed
        data += part
    return bytes(data)


def read_frame(sock: socket.socket) -> bytes:
    """The next payload of a blocking socket whose other side is our own parent."""
    (length,) = _HEADER.unpack(read_exactly(sock, _HEADER.size))
    return read_exactly(sock, length)


def read_available(sock: socket.socket, frames: Frames) -> tuple[list[bytes], bool]:
    """Payloads that a non-blocking socket holds now, and whether it is still open."""
    found: list[bytes] = []
    while True:
        try:
            data = sock.recv(_CHUNK)
        except BlockingIOError:
            return found, True
        except OSError:
            return found, False
        if not data:
            return found, False
        found += frames.feed(data)


def send_all(sock: socket.socket, data: bytes) -> None:
    """Send everything on a non-blocking socket; `Closed` when nobody takes it for a while."""
    view, deadline = memoryview(data), time.monotonic() + SEND_LIMIT_S
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    while view:
        try:
            view = view[sock.send(view) :]
        except BlockingIOError:
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(1000 * left):
                raise Closed from None
        except OSError as error:
            raise Closed from error


def score_fields(score: Score) -> dict[str, object]:
    """A score as JSON; by hand, because `asdict` copies deeply and takes ten times as long."""
    return {
        "value": score.value,
        "status": score.status,
        "detail": score.detail,
        "steps": [{"end": step.end, "correct": step.correct} for step in score.steps],
        "components": dict(score.components),
    }


def read_score(fields: object) -> Score:
    if not isinstance(fields, Mapping):
        return failed("no JSON object")
    try:
        steps = tuple(StepVerdict(**step) for step in fields.get("steps", ()))
        return checked_score(Score(**{**fields, "steps": steps}))
    except TypeError:
        return failed("fields that no Score has")


@dataclass(frozen=True, slots=True)
class PoolSetup:
    """What every worker of a pool is given."""

    rewards: tuple[PluginSpec, ...]
    context: bytes
    """The pickled `RewardContext` for rewards that override `setup`; empty where none does, because
    reading it loads torch."""

    @classmethod
    def of(cls, rewards: Sequence[Reward[Any]], context: RewardContext | None) -> PoolSetup:
        reads_context = any(type(reward).setup is not Reward.setup for reward in rewards)
        needed = context is not None and reads_context
        return cls(specs_of(rewards), pickle.dumps(context) if needed else b"")

    def load(self) -> RewardContext | None:
        """Import what the rewards need; the context they are set up with."""
        for spec in self.rewards:
            spec.load(Reward).preload()
        if not self.context:
            return None
        found: RewardContext = pickle.loads(self.context)  # noqa: S301 - from our own parent
        return found

    def build(self, context: RewardContext | None) -> list[Reward[Any]]:
        """The rewards, set up."""
        rewards: list[Reward[Any]] = [spec.make(Reward) for spec in self.rewards]
        for reward in rewards:
            if context is not None:
                reward.setup(context)
        return rewards


def specs_of(rewards: Sequence[Reward[Any]]) -> tuple[PluginSpec, ...]:
    """The specs of `rewards`; `ConfigError` for a class that another process cannot import."""
    instead = "set runs_in = 'host' on it if it can neither hang nor crash"
    return tuple(spec_of(reward, "in worker processes", instead) for reward in rewards)
