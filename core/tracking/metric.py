"""What a metric key stands for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Better = Literal["higher", "lower"] | None


@dataclass(frozen=True, slots=True)
class Metric:
    """Unit, meaning and the better direction (None = neither is better as such) of one key."""

    unit: str
    description: str
    better: Better = None
