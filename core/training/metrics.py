"""Sums and counts over micro-batches, divided once at the end: never a mean of means."""

from __future__ import annotations

import torch
from torch import Tensor


class MetricSums:
    """Accumulates masked sums, counts and extremes over the micro-batches of one update."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._counts: dict[str, float] = {}
        self._max: dict[str, float] = {}
        self._min: dict[str, float] = {}

    def add(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Add the values [B, T] at the positions where `mask` [B, T] is 1."""
        kept = values.detach()[mask.bool()].double()
        self._sums[name] = self._sums.get(name, 0.0) + float(kept.sum())
        self._counts[name] = self._counts.get(name, 0.0) + kept.numel()

    def add_extremes(self, prefix: str, values: Tensor, mask: Tensor) -> None:
        """Track `prefix/min` and `prefix/max` over the masked values."""
        kept = values.detach()[mask.bool()]
        if kept.numel() == 0:
            return
        low, high = float(kept.min()), float(kept.max())
        self._min[f"{prefix}/min"] = min(low, self._min.get(f"{prefix}/min", low))
        self._max[f"{prefix}/max"] = max(high, self._max.get(f"{prefix}/max", high))

    def add_scalar(self, name: str, value: Tensor | float) -> None:
        """Add a micro-batch's share of a quantity that sums over micro-batches (a loss)."""
        self._sums[name] = self._sums.get(name, 0.0) + float(value)
        self._counts[name] = 1.0

    def result(self) -> dict[str, float]:
        """Every metric; means of nothing are left out."""
        means = {n: s / self._counts[n] for n, s in self._sums.items() if self._counts[n] > 0}
        return means | self._min | self._max


def mismatch_metrics(trainer: Tensor, engine: Tensor, mask: Tensor) -> dict[str, float]:
    """How far the engine's log-probs [B, T] are from the trainer's for the same weights.

    d = trainer - engine over `mask`; `mismatch/k3` = mean(e^d - 1 - d) estimates KL(engine ||
    trainer) in nats per token; `ess/token` = (sum w)^2 / (n sum w^2) with w = e^d.
    """
    d = (trainer - engine)[mask.bool()].double()
    d = d[torch.isfinite(d)]
    if d.numel() == 0:
        return {}
    weight = d.clamp(-20, 20).exp()
    return {
        "mismatch/k1": float(-d.mean()),
        "mismatch/k3": float((weight - 1 - d).mean()),
        "mismatch/abs_max": float(d.abs().max()),
        "mismatch/abs_mean": float(d.abs().mean()),
        "ess/token": float(weight.sum() ** 2 / (d.numel() * (weight**2).sum())),
    }
