"""Many small pieces of work for any node of a cluster: what a node does, and how work is shared."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from posttrain.core.errors import RunError


class NodeLost(RunError):
    """The node that did a piece of work is gone, or its process is."""


@dataclass(frozen=True, slots=True)
class TryElsewhere:
    """An answer of a node that another may better: it counts if no other node is there."""

    answer: Any


@dataclass(frozen=True, slots=True)
class Unanswered:
    """What an item came to that no node answered.

    `to_blame`: it was alone with a process when that was lost, after two others that it had shared.
    Other items found no node.
    """

    reason: str
    to_blame: bool = False


class NodeWorker(Protocol):
    """The side of a node, in a process of its own there."""

    def answer(self, items: Sequence[Any]) -> Sequence[Any]:
        """One answer for each item, in order; called from several threads."""

    def close(self) -> None:
        """End what it has started."""


class NodePool(Protocol):
    """Processes on nodes, one on each, that run one worker module.

    The module's `build(setup)` gives the `NodeWorker`, or raises where its node is not fit.
    """

    def start(self, setup: object, check: Callable[[], None]) -> None:
        """Wait until it has nodes. Raises `ResourceError` where none has room."""

    def map(self, items: Sequence[Any], check: Callable[[], None]) -> list[Any]:
        """An answer for each item, in order; `Unanswered` where no node gave one.

        An error that a node's worker raises is raised. `check` is called while waiting.
        """

    def close(self) -> None:
        """End all processes; may be called twice."""


def map_or_here(
    nodes: NodePool,
    items: Sequence[Any],
    check: Callable[[], None],
    here: Callable[[Sequence[Any]], Sequence[Any]],
    warn: Callable[[int, str], None],
) -> list[Any]:
    """As `map` of `nodes`; `here` answers items that found no node, how many and why is warned.

    `Unanswered` is left where an item took its processes with it.
    """
    found = nodes.map(items, check)
    left = {
        place: answer.reason
        for place, answer in enumerate(found)
        if isinstance(answer, Unanswered) and not answer.to_blame
    }
    if left:
        warn(len(left), next(iter(left.values())))
        answers = here([items[place] for place in left])
        for place, answer in zip(left, answers, strict=True):
            found[place] = answer
    return found


@dataclass(frozen=True, slots=True)
class Sharing:
    """How much a node is given at once, in items.

    With `at_once` as many as that, in several batches, so that what is slow holds up little;
    without, one batch after another, smaller ones towards the end, of `least` items at least.
    `limit_s` is what the answer to a batch may take, by its number of items.
    """

    limit_s: Callable[[int], float]
    at_once: int | None = None
    least: int = 1

    def size(self, total: int, waiting: int, nodes: int, held: int) -> int:
        """Items of the next batch for one of `nodes`, which has `held`; `waiting` of `total` are
        left.
        """
        if self.at_once is None:
            least = min(self.least, math.ceil(total / nodes))
            return 0 if held else max(least, math.ceil(waiting / (2 * nodes)))
        part = min(math.ceil(waiting / (4 * nodes)), max(1, self.at_once // 4))
        return max(0, min(part, self.at_once - held))


@dataclass(frozen=True, slots=True)
class Batch:
    """Items by their place. `losses` counts processes that were lost with it, `avoid` names nodes
    whose answers were not good enough.
    """

    places: tuple[int, ...]
    losses: int = 0
    avoid: frozenset[str] = frozenset()

    @property
    def is_alone(self) -> bool:
        """Whether nothing else may be on its node: it has been there at two losses."""
        return self.losses >= 2


@dataclass
class Work:
    """Items that wait for a node, and the answers to the others.

    A batch whose node was lost is done again in two halves, and after a second loss each alone with
    its node: so an item that takes its process with it is found, and costs no other its answer.
    """

    items: Sequence[Any]
    answers: dict[int, Any] = field(default_factory=dict)
    _second: dict[int, Any] = field(default_factory=dict)  # answers that count if none is better
    _fresh: deque[int] = field(init=False)
    _again: deque[Batch] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._fresh = deque(range(len(self.items)))

    @property
    def is_done(self) -> bool:
        return len(self.answers) == len(self.items)

    def next_for(self, node: str, held: int, nodes: int, sharing: Sharing) -> Batch | None:
        """A batch for `node`, which holds `held` items; None where it has enough.

        What is done again comes first.
        """
        for batch in self._again:
            if node not in batch.avoid:
                if held and (batch.is_alone or sharing.at_once is None):
                    return None
                self._again.remove(batch)
                return batch
        size = 0
        if self._fresh:
            size = sharing.size(len(self.items), len(self._fresh), nodes, held)
        if not size:
            return None
        return Batch(tuple(self._fresh.popleft() for _ in range(min(size, len(self._fresh)))))

    def answered(self, batch: Batch, node: str, answers: Iterable[Any]) -> None:
        """Take in what `node` answered to `batch`."""
        again = []
        for place, answer in zip(batch.places, answers, strict=True):
            if isinstance(answer, TryElsewhere) and not batch.avoid:
                self._second[place] = answer.answer
                again.append(place)
            else:
                answer = answer.answer if isinstance(answer, TryElsewhere) else answer
                self.answers[place] = answer
        if again:
            self._again.append(Batch(tuple(again), batch.losses, frozenset({node})))

    def lost(self, batch: Batch, reason: str) -> None:
        """The node is gone that had `batch`."""
        places, losses = batch.places, batch.losses + 1
        if batch.avoid:
            self.answers.update((place, self._second[place]) for place in places)
        elif len(places) > 1:
            middle = len(places) // 2
            halves = (places[:middle], places[middle:])
            self._again.extendleft(replace(batch, places=h, losses=losses) for h in halves[::-1])
        elif batch.is_alone:
            self.answers[places[0]] = Unanswered(reason, to_blame=True)
        else:
            self._again.appendleft(replace(batch, losses=losses))

    def settle(self, nodes: Iterable[str]) -> None:
        """Let answers count that none of `nodes` could better."""
        there = set(nodes)
        for batch in [b for b in self._again if b.avoid and there <= b.avoid]:
            self._again.remove(batch)
            for place in batch.places:
                self.answers[place] = self._second[place]

    def give_up(self, reason: str) -> None:
        """No node is there for what still waits."""
        self.settle(())
        for place in range(len(self.items)):
            self.answers.setdefault(place, Unanswered(reason))
