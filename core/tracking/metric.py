"""What a metric key stands for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """Unit and meaning of one key."""

    unit: str
    description: str
