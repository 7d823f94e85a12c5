"""The picture of docs/algorithms.md: how much of the weight the longer of two responses gets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from .numbers import LONG, SHORT

COLOURS = ("#56b4e9", "#0072b2")
NOTE = "posttrain-data"


def data_of(shares: Mapping[str, tuple[float, float]]) -> str:
    """What a picture of `shares` is made of, as text."""
    return json.dumps({name: [round(x, 9) for x in pair] for name, pair in shares.items()})


def is_current(path: Path, shares: Mapping[str, tuple[float, float]]) -> bool:
    """Whether the picture at `path` was drawn from these shares."""
    if not path.is_file():
        return False
    with Image.open(path) as image:
        return image.info.get(NOTE) == data_of(shares)


def draw(path: Path, shares: Mapping[str, tuple[float, float]]) -> None:
    """Write the bars as a PNG that carries its data."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    names = sorted(shares, key=lambda name: (shares[name], name))
    for index, (long, colour) in enumerate(zip(LONG, COLOURS, strict=True)):
        places = [place + 0.36 * (index - 0.5) for place in range(len(names))]
        widths = [100 * shares[name][index] for name in names]
        label = f"{long} tokens beside {SHORT}"
        bars = axes.barh(places, widths, height=0.34, color=colour, label=label)
        axes.bar_label(bars, fmt="%.0f %%", padding=3, fontsize=8)
    axes.axvline(50, color="#7f7f7f", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.set_xlim(0, 108)
    axes.set_xlabel("share of all weight that the longer response gets (%)", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8.5, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    # No version or date: the same numbers give the same file.
    figure.savefig(path, dpi=120, metadata={"Software": None, NOTE: data_of(shares)})
