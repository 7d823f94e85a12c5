"""What the ranks of a learner are to the process that calls them, wherever they run."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from posttrain.core.errors import PosttrainError, RunError

Methods = Mapping[str, Callable[..., Any]]  # Any: each method has its own arguments
Build = Callable[[Any], Methods]  # Any: the setup, of the worker's own type
Answer = tuple[Exception | None, Any]
"""What a call came to on one rank: its error, or the value (of rank 0 only)."""


class RankLost(RunError):
    """Ranks ended that nobody stopped: a process was killed, or a node is gone."""


class RankGroup(Protocol):
    """Ranks that run one worker module, called like one object.

    `check` is called while something is waited for, and raises to stop.
    """

    size: int
    folder: Path | None
    """A folder that the ranks and this process see; None where they may be on other machines."""

    def start(self, setup: object, check: Callable[[], None]) -> None:
        """Wait until every rank is there, and let its worker build its methods of `setup`.

        Raises `RankLost` where ranks do not start.
        """

    def call(self, method: str, *args: object, check: Callable[[], None]) -> Any:
        """What `method` of rank 0 returns, after it has been called on every rank.

        An error that a rank raises arrives as its own type, and ends the group. Raises `RankLost`
        where a rank is gone.
        """

    def close(self) -> None:
        """End all ranks; may be called twice."""


def first_cause(failures: Sequence[Exception]) -> Exception:
    """What to raise of what ranks answered: those that only lost the one that failed come last."""
    return next((error for error in failures if not isinstance(error, RankLost)), failures[0])


PEER_GONE = (
    *("closed by peer", "reset by peer", "Broken pipe", "Timed out waiting"),  # gloo
    *("remote process exited", "NCCL"),
)


def _lost_a_peer(error: Exception) -> bool:
    """Whether a collective ended because another rank did."""
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in PEER_GONE)


class Answerer:
    """A rank's side: the methods that `build` makes of the setup, called one after another."""

    def __init__(self, build: Build, rank: int) -> None:
        self._build, self._rank = build, rank
        self._methods: Methods = {}

    def answer(self, message: Any) -> Answer:
        """The setup the first time, then (method, arguments)."""
        try:
            if self._methods:
                method, args = message
                value = self._methods[method](*args)
            else:
                self._methods, value = self._build(message), None
        except Exception as error:  # whatever a method raises is the caller's to see
            traceback.print_exc()
            sys.stderr.flush()
            if isinstance(error, PosttrainError):
                return error, None
            what = f"rank {self._rank} of the learner failed: {type(error).__name__}: {error}"
            return (RankLost if _lost_a_peer(error) else RunError)(what), None
        return None, value if self._rank == 0 else None
