"""How long a piece of work takes on this machine, whose caches and other users are in the way."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import cached_property

import torch

from posttrain.core.runtime.processor import cache_bytes

FEWEST_EVICTED, MOST_EVICTED = 2**25, 2**27
"""Bytes read before a cold run on a CPU, twice what its caches hold."""
AGREE, MOST_RUNS = 1.15, 5
"""Runs one after the other that differ by less tell the same; so many are made at most."""


class Stopwatch:
    """Times work on `device`; a model's layers hold `held` bytes of weights."""

    def __init__(self, device: torch.device, held: int) -> None:
        self._device, self._held = device, held

    def typical(self, work: Callable[[], object], *, cold: bool = False) -> float:
        """Mean seconds of two successive runs that agree, or the median of four.

        The first often warms up, and is then no match for the second. Not of the quickest: others
        that are at work here will be so in the run. `cold`: what it reads has left the caches, as
        what a model of many layers holds has when it is read again.
        """
        taken: list[float] = []
        while len(taken) < MOST_RUNS:
            if cold:
                self._others.sum()
            self._finish()
            began = time.perf_counter()
            work()
            self._finish()
            taken.append(time.perf_counter() - began)
            last = taken[-2:]
            if len(last) == 2 and max(last) < AGREE * min(last):
                return statistics.mean(last)
        return statistics.median(taken[1:])

    @cached_property
    def _others(self) -> torch.Tensor:
        """As large as the weights of all layers, if caches could hold those."""
        most = min(MOST_EVICTED, max(FEWEST_EVICTED, 2 * cache_bytes(MOST_EVICTED)))
        on_cpu = self._device.type == "cpu"
        return torch.ones(min(most, self._held) // 4 if on_cpu else 0)

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
