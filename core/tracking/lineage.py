"""The lineage of a pipeline as a picture: which stage read what, with digests and main results.

MLflow links runs and models but draws no graph, so every run stores this one as an artifact.
Stages stand one below the other, each below everything it reads; arrows run next to the boxes.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

BOX_WIDTH, BOX_HEIGHT = 250, 92
GAP, MARGIN = 28, 24
COLOURS = {  # Okabe and Ito's colour-blind-safe palette
    "base": "#7f7f7f",
    "sft": "#0072B2",
    "reward_model": "#CC79A7",
    "preference": "#56B4E9",
    "rl": "#D55E00",
    "distill": "#D55E00",
    "record_teacher": "#999933",
    "evaluate": "#009E73",
    "register": "#B8860B",
    "transform": "#999933",
    "approve": "#882255",
    "promote": "#B8860B",
    "new_data": "#999933",
}


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
    if "record/rows" in metrics:
        return f"{metrics['record/rows']:.0f} answers"
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


def _line_svg(role: str, start: float, end: float, distance: int) -> str:
    """An arc from the right edge of one box to that of another, `distance` boxes below."""
    x, bend = MARGIN + BOX_WIDTH, MARGIN + BOX_WIDTH + 30 + 40 * distance
    return (
        f'<path d="M{x},{start:.0f} C{bend},{start:.0f} {bend},{end:.0f} {x + 6},{end:.0f}" '
        f'class="line" marker-end="url(#tip)"/>'
        f'<text x="{x + 12}" y="{end - 4:.0f}" class="role">{html.escape(role)}</text>'
    )


def _fitting(text: str, css: str) -> str:
    """As much of a text as a box has room for, escaped; the pointer shows a name in full."""
    room = 25 if css == "name" else 33
    return html.escape(text if len(text) <= room else f"{text[: room - 1]}…")


def _box_svg(y: float, stage: LineageNode) -> str:
    x, colour = MARGIN, COLOURS.get(stage.kind, "#555555")
    kind = " · ".join(part for part in (stage.kind, stage.status) if part)
    digest = f"sha256 {stage.digest[:12]}" if stage.digest else ""
    texts = [(24, "name", stage.name), (43, "small", kind), (63, "metric", stage.metric)]
    texts.append((81, "small mono", digest))
    body = "".join(
        f'<text x="{x + 18}" y="{y + dy:.0f}" class="{css}">{_fitting(text, css)}</text>'
        for dy, css, text in texts
    )
    body += f"<title>{html.escape(stage.name)}</title>"
    return (
        f'<g><rect x="{x}" y="{y:.0f}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="8" '
        f'class="box" stroke="{colour}"/><rect x="{x}" y="{y:.0f}" width="8" '
        f'height="{BOX_HEIGHT}" rx="4" fill="{colour}"/>{body}</g>'
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


def lineage_html(stages: Sequence[LineageNode]) -> str:
    """A self-contained page with the graph of `stages`: no scripts, nothing loaded."""
    level = depths(stages)
    ordered = sorted(stages, key=lambda stage: level[stage.name])
    row = {stage.name: index for index, stage in enumerate(ordered)}
    top = {name: MARGIN + index * (BOX_HEIGHT + GAP) for name, index in row.items()}
    drawn = [_box_svg(top[stage.name], stage) for stage in ordered]
    for stage in ordered:
        read = [(role, parent) for role, parent in stage.inputs.items() if parent in row]
        # Arrows come in one below the other; those that leave start at the box's lower end.
        for place, (role, parent) in enumerate(read, start=1):
            end = top[stage.name] + BOX_HEIGHT * place / (len(read) + 2)
            start = top[parent] + BOX_HEIGHT - 10
            drawn.append(_line_svg(role, start, end, row[stage.name] - row[parent]))
    width = MARGIN + BOX_WIDTH + 60 + 30 * len(stages)
    height = 2 * MARGIN + len(stages) * (BOX_HEIGHT + GAP) - GAP
    svg = (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img" '
        'aria-label="Lineage"><defs><marker id="tip" viewBox="0 0 8 8" refX="6" '
        'refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0,0L8,4L0,8z" '
        f'fill="#888"/></marker></defs>{"".join(drawn)}</svg>'
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Lineage</title>'
        f"<style>{STYLE}</style></head><body><h1>Lineage</h1><p>Each box is a "
        "stage; an arrow is something it read. Digests are of what the stage made.</p>"
        f"{svg}</body></html>\n"
    )
