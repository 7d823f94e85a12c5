"""How long a piece of work takes on this machine, whose caches and other users are in the way."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property

import torch

from posttrain.core.runtime.processor import cache_bytes

FEWEST_EVICTED, MOST_EVICTED = 2**25, 2**27
"""Bytes read before a cold run on a CPU, twice what its caches hold."""
AGREE, MOST_RUNS = 1.15, 5
"""Runs of a measurement that differ by less are taken for undisturbed; so many are made at most."""


class Stopwatch:
    """Times work on `device`; a model's layers hold `held` bytes of weights."""

    def __init__(self, device: torch.device, held: int) -> None:
        self._device, self._held = device, held

    def typical(self, work: Callable[[], object], *, cold: bool = False) -> float:
        """Mean seconds of two runs that agree, or the quickest of five.

        The first often warms up, and is then no match for the second; where others are at work some
        are held up. `cold`: what it reads has left the caches, as what a model of many layers holds
        has when it is read again.
        """
        taken: list[float] = []
        while len(taken) < MOST_RUNS:
            if cold:
                self._others.sum()
            self._finish()
            began = time.perf_counter()
            work()
            self._finish()
            taken = sorted([*taken, time.perf_counter() - began])
            if len(taken) > 1 and taken[1] < AGREE * taken[0]:
                return (taken[0] + taken[1]) / 2
        return taken[0]

    @cached_property
    def _others(self) -> torch.Tensor:
        """As large as the weights of all layers, if caches could hold those."""
        most = min(MOST_EVICTED, max(FEWEST_EVICTED, 2 * cache_bytes(MOST_EVICTED)))
        on_cpu = self._device.type == "cpu"
        return torch.ones(min(most, self._held) // 4 if on_cpu else 0)

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
