"""A plugin package that entry points offer, without installing it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def offer(folder: Path, name: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands that are started from now on find a plugin module of that name and code."""
    site = folder / "site"
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[posttrain.plugins]\n{name} = {name}\n")
    (site / f"{name}.py").write_text(code)
    paths = [str(site), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
