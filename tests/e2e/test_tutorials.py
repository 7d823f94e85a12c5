"""The tutorials' commands work: each page is followed in a fresh folder, with a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.tutorials import blocks, run_page

TUTORIALS = Path(__file__).resolve().parents[2] / "docs" / "tutorials"
PAGES = sorted(path.name for path in TUTORIALS.glob("*.md"))
SAMPLE = "own-data.zh.md"
"""Followed in every CI run, since it takes seconds; the others train models."""


@pytest.mark.parametrize(
    "name",
    [name if name == SAMPLE else pytest.param(name, marks=pytest.mark.slow) for name in PAGES],
)
def test_a_tutorial_can_be_followed(name: str, tmp_path: Path) -> None:
    printed = run_page(TUTORIALS / name, tmp_path)
    runs = [block for block in blocks(TUTORIALS / name) if block.does == "run"]
    assert bool(printed) == bool(runs)
    assert name.startswith("reading-a-run") or runs
