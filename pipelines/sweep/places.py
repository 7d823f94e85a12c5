"""Where the branches of a sweep run, as its driver sees it.

A `Place` runs one branch at a time, and reports what happens as messages. What it is behind that, a
process of this machine, a run of a Prefect work pool or a process on a node of a Ray cluster, is
its `Placement`'s to say.
"""

from __future__ import annotations

import queue
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from posttrain.pipelines.sweep.branches import Branch

STOP_S = 60.0
"""What a run has to end at its next safe point, before what runs it is ended."""
Json = dict[str, Any]  # Any: JSON
Messages = queue.SimpleQueue[tuple["Place", Json | None]]


class BranchRequest(BaseModel):
    """A branch as it is sent to where it runs. `store` is a folder or a URL, `tags` those of
    MLflow.
    """

    model_config = ConfigDict(extra="forbid")

    key: str
    configs: list[str | dict[str, Any]]  # Any: YAML values
    overrides: list[str]
    home: str
    store: str
    tags: dict[str, str]


class Place(ABC):
    """Runs one branch at a time.

    It puts messages into the sweep's queue, as `worker.run_branch` makes them; None is the last
    one, from a place that has ended by itself.
    """

    def __init__(self, messages: Messages) -> None:
        self.branch: Branch | None = None
        self.pending: set[str] = set()
        """Stages of its branch that are not done yet."""
        self.is_ready = True
        """Whether it can take a branch; a place that becomes so later says `ready`."""
        self.messages = messages

    def run(self, branch: Branch, request: BranchRequest) -> None:
        """Begin with a branch."""
        self.branch, self.pending = branch, set(branch.stages.values())
        self.begin(request)

    @abstractmethod
    def begin(self, request: BranchRequest) -> None:
        """Begin with what is asked for."""

    @abstractmethod
    def stop_run(self) -> None:
        """End its run at the next safe point; the place stays."""

    @abstractmethod
    def interrupt(self) -> None:
        """As Ctrl-C does: its run ends at the next safe point, and the place with it."""

    @abstractmethod
    def end(self) -> None:
        """Wait for its end after `interrupt`; end what does not end by itself."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once; nothing if it has ended."""

    @abstractmethod
    def how_it_ended(self) -> str:
        """In words, for a branch that it was at."""


class Placement(Protocol):
    """Makes the places of one sweep."""

    most: int
    """How many branches run at once."""

    def open(self, messages: Messages) -> Place:
        """One more place."""

    def close(self) -> None:
        """Give back what all places have in common, after they have ended."""


def sent(branch: Branch, **given: Any) -> BranchRequest:  # Any: the other fields
    """The request for a branch."""
    return BranchRequest(key=branch.key, overrides=list(branch.overrides), **given)
