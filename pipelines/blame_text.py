"""A model's past as people and programs read it: an indented tree, or JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

from posttrain.pipelines.blame import Blamed


def lines(blamed: list[Blamed]) -> Iterator[str]:
    """The past as an indented tree, a line for each fact."""
    for item in blamed:
        pad = "   " * item.depth
        place = f"{item.place}: " if item.place else ""
        digest = item.digest[:12]
        if not item.stage:
            yield f"{pad}{place}{item.what} {digest} {item.source}".rstrip()
            continue
        if item.told_above:
            yield f"{pad}{place}{item.what} {digest} of stage {item.stage} (told above)"
            continue
        yield f"{pad}{place}{item.what} {digest} of stage {item.stage} ({item.kind})"
        for fact in _facts(item):
            yield f"{pad}   - {fact}"


def _facts(item: Blamed) -> Iterator[str]:
    if item.run_id:
        yield f"run {item.run_id}, began {item.began}"
    if item.mlflow_run_id:
        prefect = f", Prefect {item.prefect_flow_run_id}" if item.prefect_flow_run_id else ""
        yield f"MLflow {item.mlflow_run_id}{prefect}"
    yield f"posttrain {item.code}"
    if item.environment:
        yield ", ".join(f"{name} {value}" for name, value in item.environment.items())
    for data in item.data:
        yield (
            f"data {data.name} ({data.context}): {data.num_rows} rows, sha256 {data.sha256[:12]}, "
            f"from {data.source}"
        )
    for setting in item.settings:
        before = "" if setting.default is None else f"{_short(setting.default)} -> "
        yield f"{setting.place}: {before}{_short(setting.value)}"
    by_version: dict[str, list[str]] = {}
    for name, version in item.plugins.items():
        by_version.setdefault(version, []).append(name)
    for version, names in by_version.items():
        yield f"plugins of {version}: {', '.join(names)}"


def _short(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def to_json(model: str, blamed: list[Blamed], notes: list[str]) -> dict[str, object]:
    """The same as one JSON object."""
    return {"model": model, "notes": notes, "past": [asdict(item) for item in blamed]}
