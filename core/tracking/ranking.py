"""Which metrics of a step are recorded where it has more than a step may have."""

from __future__ import annotations

from collections.abc import Iterable

from posttrain.core.tracking.metric_names import METRICS

MAX_KEYS_PER_STEP = 100
ALARM = "alarm/"
_RANKS = {name: rank for rank, name in enumerate(METRICS)}


def left_out(names: Iterable[str]) -> tuple[str, ...]:
    """The names beyond the first 100, sorted: alarms first, then in the catalogue's order."""

    def rank(name: str) -> tuple[bool, int, str]:
        return not name.startswith(ALARM), _RANKS.get(name, len(_RANKS)), name

    return tuple(sorted(sorted(names, key=rank)[MAX_KEYS_PER_STEP:]))
