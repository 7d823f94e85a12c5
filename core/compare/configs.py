"""What differs between configs: by dotted key, and whether it is more than the seed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

SAME_EXPERIMENT = ("seed", "name", "run_name", "description", "keep", "limits")
"""Top-level keys in which runs of one experiment may differ: the draw, names, what is kept."""


def flatten(values: Mapping[str, Any]) -> dict[str, str]:
    """Nested values (Any: YAML) as `a.b.0.c` to JSON text; an empty mapping or list is a value."""
    found: dict[str, str] = {}

    def walk(place: str, value: Any) -> None:  # Any: YAML
        inside: list[tuple[str, Any]] = []
        if isinstance(value, Mapping):
            inside = [(str(key), item) for key, item in value.items()]
        elif isinstance(value, list | tuple) and any(isinstance(i, Mapping) for i in value):
            inside = [(str(number), item) for number, item in enumerate(value)]
        if not inside:
            found[place] = json.dumps(value, default=str)
        for key, item in inside:
            walk(f"{place}.{key}" if place else key, item)

    walk("", values)
    return found


def differences(configs: Sequence[Mapping[str, str]]) -> dict[str, list[str | None]]:
    """Keys whose values are not all the same, with each config's value; None where it has none."""
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = {key: [config.get(key) for config in configs] for key in keys}
    return {key: row for key, row in rows.items() if len(set(row)) > 1}


def experiment(config: Mapping[str, str]) -> str:
    """What two runs of one experiment have in common, as text to compare."""
    kept = {k: v for k, v in config.items() if k.partition(".")[0] not in SAME_EXPERIMENT}
    return json.dumps(kept, sort_keys=True)
