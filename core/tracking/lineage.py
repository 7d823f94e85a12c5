"""The lineage of a pipeline as a picture: which stage read what, with digests and main results.

MLflow links runs and models but draws no graph, so every run stores this one as an artifact.
The layout is layered: a stage stands below everything it reads, and a line that would pass through
a layer goes around its boxes.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

BOX_WIDTH, BOX_HEIGHT, LANE_WIDTH = 250, 92, 26
GAP_X, GAP_Y, MARGIN = 26, 62, 24
COLOURS = {  # Okabe and Ito's colour-blind-safe palette
    "base": "#7f7f7f",
    "sft": "#0072B2",
    "reward_model": "#CC79A7",
    "preference": "#56B4E9",
    "rl": "#D55E00",
    "evaluate": "#009E73",
    "register": "#B8860B",
    "transform": "#999933",
    "approve": "#882255",
    "promote": "#B8860B",
    "new_data": "#999933",
}
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class LineageNode:
    """One stage: `inputs` is role -> stage name, `digest` the sha256 of what it made."""

    name: str
    kind: str
    inputs: Mapping[str, str] = field(default_factory=dict)
    digest: str = ""
    metric: str = ""
    status: str = ""


def percent(metrics: Mapping[str, float], key: str, low: str, high: str) -> str:
    """`61.5 % (58.0 to 65.0)`, without the interval if it was not measured."""
    text = f"{100 * metrics[key]:.1f} %"
    if low in metrics and high in metrics:
        text += f" ({100 * metrics[low]:.1f} to {100 * metrics[high]:.1f})"
    return text


def headline(metrics: Mapping[str, float]) -> str:
    """The one result worth showing of a stage: held-out results before training ones."""
    if "eval/greedy_accuracy" in metrics:
        bounds = ("eval/greedy_low", "eval/greedy_high")
        return f"accuracy {percent(metrics, 'eval/greedy_accuracy', *bounds)}"
    if "rm/held_out_pair_accuracy" in metrics:
        bounds = ("rm/held_out_low", "rm/held_out_high")
        return f"pairs {percent(metrics, 'rm/held_out_pair_accuracy', *bounds)}"
    if "pref/held_out_pair_accuracy" in metrics:
        bounds = ("pref/held_out_low", "pref/held_out_high")
        return f"pairs {percent(metrics, 'pref/held_out_pair_accuracy', *bounds)}"
    if "approve/approved" in metrics:
        return "approved" if metrics["approve/approved"] else "rejected"
    if "promote/promoted" in metrics:
        return "champion" if metrics["promote/promoted"] else "not promoted"
    if "new_data/rows" in metrics:
        return f"{metrics['new_data/rows']:.0f} new rows"
    if "transform/kept" in metrics:
        return f"kept {metrics['transform/kept']:.0f} of {metrics['transform/num_problems']:.0f}"
    for key, label in (("reward/mean", "reward"), ("sft/loss", "loss"), ("loss/sft", "loss")):
        if key in metrics:
            return f"{label} {metrics[key]:.3f}"
    return ""


def depths(stages: Sequence[LineageNode]) -> dict[str, int]:
    """Layer of each stage: one more than the deepest stage it reads; unknown inputs are ignored."""
    known = {stage.name: stage for stage in stages}
    found: dict[str, int] = {}

    def depth(name: str) -> int:
        if name not in found:
            parents = [p for p in known[name].inputs.values() if p in known]
            found[name] = 1 + max((depth(parent) for parent in parents), default=-1)
        return found[name]

    for stage in stages:
        depth(stage.name)
    return found


@dataclass(slots=True)
class _Cell:
    """A box, or a lane (`stage` None) through which a long line passes a layer."""

    stage: LineageNode | None
    parents: list[_Cell] = field(default_factory=list)
    x: float = 0.0
    y: float = 0.0

    @property
    def width(self) -> float:
        return BOX_WIDTH if self.stage else LANE_WIDTH


@dataclass(slots=True)
class _Line:
    role: str
    cells: list[_Cell]


def _layout(stages: Sequence[LineageNode]) -> tuple[list[list[_Cell]], list[_Line], float, float]:
    """Cells by layer with their places, the lines, and the picture's width and height (px)."""
    level = depths(stages)
    cells = {stage.name: _Cell(stage) for stage in stages}
    layers: list[list[_Cell]] = [[] for _ in range(max(level.values(), default=-1) + 1)]
    for stage in stages:
        layers[level[stage.name]].append(cells[stage.name])
    lines: list[_Line] = []
    for stage in stages:
        for role, parent in stage.inputs.items():
            if parent in cells:
                path = [cells[parent]]
                for layer in layers[level[parent] + 1 : level[stage.name]]:
                    layer.append(_Cell(None, [path[-1]]))
                    path.append(layer[-1])
                cells[stage.name].parents.append(path[-1])
                lines.append(_Line(role, [*path, cells[stage.name]]))
    widths = [sum(c.width for c in row) + GAP_X * (len(row) - 1) for row in layers]
    width = max(widths, default=0) + 2 * MARGIN
    for index, row in enumerate(layers):
        # A cell goes where the middle of its parents is, which keeps lines short and uncrossed.
        row.sort(key=lambda c: sum(p.x for p in c.parents) / len(c.parents) if c.parents else 0)
        left = (width - widths[index]) / 2
        for cell in row:
            cell.x, cell.y = left + cell.width / 2, MARGIN + index * (BOX_HEIGHT + GAP_Y)
            left += cell.width + GAP_X
    height = 2 * MARGIN + len(layers) * (BOX_HEIGHT + GAP_Y) - GAP_Y
    return layers, lines, width, height


def _ends(line: _Line) -> list[Point]:
    """Points the line goes through: down out of a box, through lanes, into the next box."""
    points: list[Point] = [(line.cells[0].x, line.cells[0].y + BOX_HEIGHT)]
    for lane in line.cells[1:-1]:
        points += [(lane.x, lane.y), (lane.x, lane.y + BOX_HEIGHT)]
    return [*points, (line.cells[-1].x, line.cells[-1].y - 6)]


def _line_svg(line: _Line, shift: float) -> str:
    points = _ends(line)
    points[-1] = (points[-1][0] + shift, points[-1][1])
    path = f"M{points[0][0]:.0f},{points[0][1]:.0f}"
    for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
        middle = (y0 + y1) / 2
        path += f" C{x0:.0f},{middle:.0f} {x1:.0f},{middle:.0f} {x1:.0f},{y1:.0f}"
    x, y = points[-1]
    return (
        f'<path d="{path}" class="line" marker-end="url(#tip)"/>'
        f'<text x="{x + 7:.0f}" y="{y - 9:.0f}" class="role">{html.escape(line.role)}</text>'
    )


def _box_svg(cell: _Cell, stage: LineageNode) -> str:
    x, y, colour = cell.x - BOX_WIDTH / 2, cell.y, COLOURS.get(stage.kind, "#555555")
    kind = " · ".join(part for part in (stage.kind, stage.status) if part)
    digest = f"sha256 {stage.digest[:12]}" if stage.digest else ""
    texts = [(24, "name", stage.name), (43, "small", kind), (63, "metric", stage.metric)]
    texts.append((81, "small mono", digest))
    body = "".join(
        f'<text x="{x + 18:.0f}" y="{y + dy:.0f}" class="{css}">{html.escape(text)}</text>'
        for dy, css, text in texts
    )
    return (
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="8" '
        f'class="box" stroke="{colour}"/><rect x="{x:.0f}" y="{y:.0f}" width="8" '
        f'height="{BOX_HEIGHT}" rx="4" fill="{colour}"/>{body}'
    )


STYLE = """
body{font:15px system-ui,'DejaVu Sans',sans-serif;color:#1a1a1a;background:#fff;margin:20px}
h1{font-size:20px;margin:0 0 4px}p{color:#555;margin:0 0 12px}
svg{max-width:100%;height:auto}.box{fill:#fff;stroke-width:1.5}.name{font-size:15px;font-weight:600}
.small{font-size:12px;fill:#555}.mono{font-family:ui-monospace,'DejaVu Sans Mono',monospace}
.metric{font-size:13px}
.role{font-size:11px;fill:#555;paint-order:stroke;stroke:#fff;stroke-width:3px}
.line{fill:none;stroke:#888;stroke-width:1.5}
"""


def lineage_html(stages: Sequence[LineageNode], title: str = "Lineage") -> str:
    """A self-contained page with the graph of `stages`: no scripts, nothing loaded."""
    layers, lines, width, height = _layout(stages)
    arrivals: dict[int, list[_Line]] = {}
    for line in lines:
        arrivals.setdefault(id(line.cells[-1]), []).append(line)
    drawn = []
    for group in arrivals.values():
        group.sort(key=lambda line: line.cells[-2].x)
        spread = min(110, 220 / max(1, len(group) - 1))
        for index, line in enumerate(group):  # arrows into one box end side by side
            drawn.append(_line_svg(line, (index - (len(group) - 1) / 2) * spread))
    boxes = [_box_svg(cell, cell.stage) for row in layers for cell in row if cell.stage]
    svg = (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" role="img" '
        f'aria-label="{html.escape(title)}"><defs><marker id="tip" viewBox="0 0 8 8" refX="6" '
        'refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0,0L8,4L0,8z" '
        f'fill="#888"/></marker></defs>{"".join(drawn)}{"".join(boxes)}</svg>'
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}'
        f"</title><style>{STYLE}</style></head><body><h1>{html.escape(title)}</h1><p>Each box is a "
        "stage; an arrow is something it read. Digests are of what the stage made.</p>"
        f"{svg}</body></html>\n"
    )


def lineage_markdown(stages: Sequence[LineageNode], title: str = "Lineage") -> str:
    """The same as a Markdown table, one row per stage in the order given."""
    lines = [
        f"# {title}",
        "",
        "| stage | kind | reads | result | status | digest |",
        "|---|---|---|---|---|---|",
    ]
    for stage in stages:
        reads = ", ".join(f"{role}: {name}" for role, name in stage.inputs.items()) or "-"
        digest = f"`{stage.digest[:12]}`" if stage.digest else "-"
        row = (stage.name, stage.kind, reads, stage.metric or "-", stage.status or "-", digest)
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |")
    return "\n".join(lines) + "\n"
