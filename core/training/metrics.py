"""Sums and counts over micro-batches, divided once at the end: never a mean of means."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


class MetricSums:
    """Accumulates masked sums, counts and extremes over the micro-batches of one update."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._counts: dict[str, float] = {}
        self._max: dict[str, float] = {}
        self._min: dict[str, float] = {}
        self._shares: set[str] = set()
        self.suspects: set[int] = set()  # rows whose part of the loss is not finite

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

    def add_largest(self, name: str, value: float) -> None:
        """Track the largest of the values given."""
        self._max[name] = max(value, self._max.get(name, value))

    def add_scalar(self, name: str, value: Tensor | float) -> None:
        """Add a micro-batch's share of a quantity that sums over micro-batches (a loss)."""
        self._sums[name] = self._sums.get(name, 0.0) + float(value)
        self._counts[name] = 1.0
        self._shares.add(name)

    def add_means(self, values: Mapping[str, float]) -> None:
        """Add one measurement each of quantities that are averaged over measurements."""
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
            self._counts[name] = self._counts.get(name, 0.0) + 1.0

    def merge(self, other: MetricSums) -> None:
        """Add everything that `other` has accumulated; shares of a sum stay a sum."""
        for name, value in other._sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
            shares = name in other._shares
            self._counts[name] = (
                1.0 if shares else self._counts.get(name, 0.0) + other._counts[name]
            )
        self._shares |= other._shares
        self.suspects |= other.suspects
        for name, value in other._max.items():
            self._max[name] = max(value, self._max.get(name, value))
        for name, value in other._min.items():
            self._min[name] = min(value, self._min.get(name, value))

    def mean(self, name: str, *, default: float) -> float:
        """One metric as it stands; `default` when nothing was added."""
        count = self._counts.get(name, 0.0)
        return self._sums[name] / count if count else default

    def pop(self, name: str, *, default: float) -> float:
        """One metric as it stands, which is then forgotten; `default` when nothing was added."""
        value = self.mean(name, default=default)
        self._sums.pop(name, None)
        self._counts.pop(name, None)
        self._shares.discard(name)
        return value

    def blamed(self, rows: Tensor) -> list[int]:
        """Of `rows` [n], the suspects, which are places in it; all of them without suspects."""
        return (rows[sorted(self.suspects)] if self.suspects else rows).tolist()

    def result(self) -> dict[str, float]:
        """Every metric; means of nothing are left out."""
        means = {n: s / self._counts[n] for n, s in self._sums.items() if self._counts[n] > 0}
        return means | self._min | self._max
