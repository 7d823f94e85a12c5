"""Runs and their forks as a picture: each run a line over its steps, which leaves its parent's.

The page is one SVG without scripts, and loads nothing.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from posttrain.core.analysis.report import html_page

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B8860B", "#56B4E9", "#882255", "#999933")
LINE_WIDTH, TEXT_WIDTH = 460, 640
MARGIN, ROW, HEAD = 28, 92, 40
SHOWN_CHANGES = 2


@dataclass(frozen=True, slots=True)
class RunLine:
    """A run: `stages` has the steps of each stage that takes steps, in order.

    `stage` and `step` say where it was forked from `parent`; without a step before the stage's
    first. `changes` are settings that differ from the parent's, `result` what it reached.
    """

    run: str
    name: str
    stages: Mapping[str, int]
    parent: str = ""
    stage: str = ""
    step: int | None = None
    changes: Sequence[str] = ()
    result: str = ""
    status: str = ""

    @property
    def length(self) -> int:
        """All its steps."""
        return sum(self.stages.values())

    @property
    def begins(self) -> int:
        """The shared steps, those of earlier stages among them."""
        if not self.parent:
            return 0
        names = list(self.stages)
        before = names[: names.index(self.stage)] if self.stage in names else names
        return sum(self.stages[name] for name in before) + (self.step or 0)

    @property
    def forked(self) -> str:
        """Where it was forked, in words."""
        if not self.parent:
            return ""
        at = f"after step {self.step} of" if self.step else "before"
        return f"forked from {self.parent[:12]} {at} {self.stage}"


def in_tree_order(runs: Sequence[RunLine]) -> list[RunLine]:
    """Each run followed by its forks; one whose parent is not among them stands by itself."""
    known = {run.run for run in runs}
    found: list[RunLine] = []

    def visit(run: RunLine) -> None:
        found.append(run)
        forks = [other for other in runs if other.parent == run.run]
        for fork in sorted(forks, key=lambda fork: fork.begins):
            visit(fork)

    for run in runs:
        if run.parent not in known:
            visit(run)
    return found


def fork_page(runs: Sequence[RunLine], title: str) -> str:
    """The page with all `runs`, which are in the order of their rows."""
    longest = max((run.length for run in runs), default=1) or 1
    rows = {run.run: MARGIN + HEAD + number * ROW for number, run in enumerate(runs)}
    drawn = [_axis(runs, longest, rows)]
    for number, run in enumerate(runs):
        colour = COLOURS[number % len(COLOURS)]
        drawn.append(_line(run, rows, longest, colour))
        drawn.append(_texts(run, rows[run.run], colour))
    width = 2 * MARGIN + LINE_WIDTH + TEXT_WIDTH
    height = 2 * MARGIN + HEAD + ROW * len(runs)
    svg = (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'aria-label="{html.escape(title)}">{"".join(drawn)}</svg>'
    )
    body = (
        f"<h1>{html.escape(title)}</h1><p>A line is a run over its optimizer steps, stage after "
        "stage. A fork leaves the line of the run that it was forked from at the last step that "
        f"both share.</p>{svg}"
    )
    return html_page(title, _STYLE, body)


_STYLE = """
body{font:15px system-ui,'DejaVu Sans',sans-serif;color:#1a1a1a;background:#fff;margin:20px}
h1{font-size:20px;margin:0 0 4px}p{color:#555;margin:0 0 12px}svg{max-width:100%;height:auto}
.name{font-size:15px;font-weight:600}.small{font-size:12px;fill:#555}.result{font-size:13px}
.mono{font-family:ui-monospace,'DejaVu Sans Mono',monospace}.tick{stroke:#e4e4e4;stroke-width:1}
.stem{fill:none;stroke:#999;stroke-width:2}.place{fill:#fff;stroke:#666;stroke-width:2.5}
"""


def _x(steps: float, longest: int) -> float:
    return MARGIN + LINE_WIDTH * steps / longest


def _axis(runs: Sequence[RunLine], longest: int, rows: Mapping[str, int]) -> str:
    """Where stages begin, by the longest run, with their names and steps."""
    if not runs:
        return ""
    whole = max(runs, key=lambda run: run.length)
    bottom, at, parts = max(rows.values()) + ROW // 2, 0, []
    for name, steps in whole.stages.items():
        x, end = _x(at, longest), _x(at + steps, longest)
        for edge in (x, end):
            parts.append(
                f'<line x1="{edge:.1f}" y1="{MARGIN + 18}" x2="{edge:.1f}" y2="{bottom}" '
                'class="tick"/>'
            )
        label = f"{name}, {steps} steps" if end - x > 90 else name
        if end - x > 7 * len(label):
            middle = (x + end) / 2
            parts.append(
                f'<text x="{middle:.1f}" y="{MARGIN + 12}" text-anchor="middle" class="small">'
                f"{html.escape(label)}</text>"
            )
        at += steps
    return "".join(parts)


def _line(run: RunLine, rows: Mapping[str, int], longest: int, colour: str) -> str:
    y, start, end = rows[run.run], _x(run.begins, longest), _x(run.length, longest)
    parts = []
    if run.parent in rows:
        above, bend = rows[run.parent], 14
        parts.append(
            f'<path d="M{start:.1f},{above} V{y - bend}" class="stem"/>'
            f'<path d="M{start:.1f},{y - bend} Q{start:.1f},{y} {start + bend:.1f},{y} '
            f'H{max(end, start + bend):.1f}" fill="none" stroke="{colour}" stroke-width="3"/>'
            f'<circle cx="{start:.1f}" cy="{above}" r="5" class="place"/>'
        )
    else:
        parts.append(
            f'<line x1="{start:.1f}" y1="{y}" x2="{end:.1f}" y2="{y}" stroke="{colour}" '
            'stroke-width="3"/>'
        )
    parts.append(f'<circle cx="{end:.1f}" cy="{y}" r="6" fill="{colour}"/>')
    pointed = "; ".join([run.forked or run.name, *run.changes])
    return f"<g>{''.join(parts)}<title>{html.escape(pointed)}</title></g>"


def _texts(run: RunLine, y: int, colour: str) -> str:
    x = MARGIN + LINE_WIDTH + 28
    shown = [*run.changes[:SHOWN_CHANGES]]
    if len(run.changes) > SHOWN_CHANGES:
        shown.append(f"and {len(run.changes) - SHOWN_CHANGES} more")
    changed = ", ".join(shown) or ("nothing changed" if run.parent else "")
    where = " · ".join(part for part in (run.forked, run.status) if part)
    lines = [
        (-14, "name mono", run.run[:12], f' fill="{colour}"'),
        (4, "small", where or run.name, ""),
        (21, "small mono", changed, ""),
        (40, "result", run.result, ""),
    ]
    return "".join(
        f'<text x="{x}" y="{y + down}" class="{css}"{fill}>{_fitting(text)}</text>'
        for down, css, text, fill in lines
        if text
    )


def _fitting(text: str) -> str:
    room = 84
    return html.escape(text if len(text) <= room else f"{text[: room - 1]}…")
