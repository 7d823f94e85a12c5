"""Files in the memory of a cluster, and what the servers of an engine take of its nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SharedFiles:
    """Files in the object store; they are there for as long as somebody has this.

    `digests` has the sha256 of each by its name, `references` stand in the same order.
    """

    digests: Mapping[str, str]
    references: tuple[Any, ...]  # Any: Ray's, and this module does not import Ray
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """A model's weights as safetensors files, and the shape of each by its name."""

    files: SharedFiles
    shapes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class ServerPlaces:
    """So many servers on the nodes of the cluster that was joined, with so much for each."""

    replicas: int
    cpus: int
    gpus: int
    start_timeout_s: float

    @property
    def bundle(self) -> dict[str, float]:
        """What one takes, in Ray's words, without what is not needed."""
        amounts = {"CPU": float(self.cpus), "GPU": float(self.gpus)}
        return {name: amount for name, amount in amounts.items() if amount}
