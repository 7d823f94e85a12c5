"""The learning curves that a stage saves, as a PNG and as one HTML page that loads nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

from posttrain.core.analysis.charts_page import Section, charts_page
from posttrain.core.analysis.pictures import (
    BLACK,
    BLUE,
    GOLD,
    GREEN,
    ORANGE,
    PINK,
    SKY,
    Panel,
    Series,
    accuracies,
    curves,
)
from posttrain.core.analysis.svg import Chart

COMPONENT = "reward/component/"
HUGE = 1e300  # MLflow stores an infinity as the largest float: neither can be drawn
Rows = Sequence[Mapping[str, float]]
Curve = tuple[str, str, str]
"""Metric, label and colour; a curve without a colour takes the next of a palette."""


def learning_curves(history: Rows, evaluations: Rows, title: str, folder: Path) -> list[Path]:
    """Write learning_curves.png and .html to `folder`: reward, accuracy, length, KL and others.

    Rows hold "step" and metrics by name. `evaluations` draws eval/greedy_accuracy with the bars
    from eval/greedy_low to eval/greedy_high. Returns both paths, the PNG first.
    """
    return _write(learning_panels(history, evaluations), title, folder)


def preference_curves(history: Rows, rankings: Rows, title: str, folder: Path) -> list[Path]:
    """The same for learning from preferences: loss, ranking, rewards, log-probs, both falling.

    `rankings` draws pref/held_out_pair_accuracy (or _row_accuracy) with its bars.
    """
    return _write(preference_panels(history, rankings), title, folder)


def before_after(
    results: Sequence[tuple[str, float, float, float]], title: str, folder: Path
) -> Path:
    """Write `folder`/before_after.png: a bar per (label, accuracy, low, high), as fractions."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "before_after.png"
    path.write_bytes(accuracies(results, title))
    return path


def _write(panels: Sequence[Panel], title: str, folder: Path) -> list[Path]:
    png, page = folder / "learning_curves.png", folder / "learning_curves.html"
    folder.mkdir(parents=True, exist_ok=True)
    png.write_bytes(curves(panels, title))
    charts = [Chart(panel) for panel in panels]
    page.write_text(charts_page([Section(charts)], title), "utf-8")
    return [png, page]


# --- panels --------------------------------------------------------------------------------------


def learning_panels(history: Rows, evaluations: Rows) -> list[Panel]:
    """The six panels of a learning curve, and those of what only some stages have.

    Rows of `history` and `evaluations` hold "step" and metrics by name; missing ones leave gaps.
    """
    names = sorted({key for row in history for key in row if key.startswith(COMPONENT)})
    parts = [(name, name.removeprefix(COMPONENT), "") for name in names]
    held_out = "held-out, greedy, 95 % interval"
    return [
        _panel(
            "Reward",
            "reward",
            history,
            *(parts if len(parts) > 1 else ()),  # a single component is the total
            ("reward/mean", "total", BLACK),
        ),
        _panel(
            "Accuracy",
            "fraction correct",
            history,
            ("acc/mean", "training batch, sampled", BLUE),
            bars=_bars(evaluations, "eval/greedy_accuracy", "eval/greedy", held_out),
        ),
        _panel("Entropy", "nats per token", history, ("entropy/mean", "policy", BLUE)),
        _panel(
            "Response length",
            "tokens",
            history,
            ("resp_len/max", "longest", SKY),
            ("resp_len/mean", "mean", BLUE),
        ),
        _panel(
            "KL divergence (k3)",
            "nats per token",
            history,
            ("kl/old_k3", "from the rollout's policy", BLUE),
            ("kl/ref_k3", "from the reference", ORANGE),
            ("mismatch/k3", "engine against trainer", GREEN),
        ),
        _panel(
            "Clipped tokens",
            "fraction of tokens",
            history,
            ("clip/high_frac", "upper bound", ORANGE),
            ("clip/low_frac", "lower bound", BLUE),
        ),
        *occasional_panels(history),
    ]


def occasional_panels(history: Rows) -> list[Panel]:
    """Of samplers that remember, teachers, and what environments write; those with any value."""
    bands = (("below", SKY), ("inside", GREEN), ("above", ORANGE))
    known = [(f"curriculum/known_frac/{band}", f"{band} the band", c) for band, c in bands]
    rates = [(f"curriculum/pass_rate/{band}", f"{band} the band", c) for band, c in bands]
    shares = _of_tasks("progress/share/", history)
    panels = [
        _panel(
            "Curriculum: problems by pass rate",
            "fraction",
            history,
            *known,
            ("curriculum/unseen_frac", "unseen, of the batch", BLACK),
        ),
        _panel(
            "Curriculum: accuracy by band",
            "fraction correct",
            history,
            *rates,
            ("curriculum/pass_rate/unseen", "unseen", BLACK),
        ),
        _panel("Tasks: shares", "fraction of the batch", history, *shares),
        _panel("Tasks: accuracy", "fraction correct", history, *_of_tasks("acc/task/", history)),
        _panel(
            "From the teacher",
            "nats per token",
            history,
            ("distil/rollout_kl", "KL of the policy, sampled", BLUE),
            ("distil/divergence", "divergence that is learned from", ORANGE),
        ),
        _panel(
            "Replayed groups",
            "fraction of the batch",
            history,
            ("replay/taken_frac", "sampled before", BLUE),
        ),
        _panel(
            "Observations (not sampled)",
            "nats per token",
            history,
            ("observed/nll", "negative log-prob", BLUE),
        ),
    ]
    return [panel for panel in panels if panel.series]


def _of_tasks(prefix: str, history: Rows) -> list[tuple[str, str, str]]:
    """(metric, label, colour) of each task of a mixture."""
    names = sorted({name for row in history for name in row if name.startswith(prefix)})
    colours = cycle((BLUE, ORANGE, GREEN, SKY, BLACK))
    return [
        (name, name.removeprefix(prefix), colour)
        for name, colour in zip(names, colours, strict=False)
    ]


def preference_panels(history: Rows, rankings: Rows) -> list[Panel]:
    """The six panels of learning from preferences; rows as in `learning_panels`."""
    ranked = [
        series
        for what in ("pair", "row")
        for series in _bars(
            rankings,
            f"pref/held_out_{what}_accuracy",
            "pref/held_out",
            "held-out, 95 % interval",
        )
    ]
    return [
        _panel("Loss", "loss", history, ("loss/preference", "training batch", BLUE)),
        _panel(
            "Answers ranked right",
            "fraction",
            history,
            ("rewards/accuracy", "training batch, pairs", BLUE),
            bars=ranked,
        ),
        _panel("Implied reward", "reward", history, *_both("rewards/{}")),
        _panel("Log-prob of the answers", "nats per token", history, *_both("logps/{}_per_token")),
        _away_from_reference(history),
        _panel("Gradient norm", "L2 norm", history, ("grad/norm", "before clipping", BLUE)),
    ]


def _away_from_reference(history: Rows) -> Panel:
    """How often both answers of a pair fall; single answers have no pair, but move as well."""
    falling = _panel(
        "Both answers less likely than under the reference",
        "fraction of pairs",
        history,
        ("pref/both_falling", "training batch", BLUE),
    )
    if falling.series:
        return falling
    title = "Log-prob of the answers, less the reference's"
    return _panel(title, "nats per answer", history, *_both("logps/{}_delta"))


def _both(metric: str) -> list[Curve]:
    return [
        (metric.format("chosen"), "chosen", BLUE),
        (metric.format("rejected"), "rejected", ORANGE),
    ]


def _panel(
    title: str, unit: str, history: Rows, *wanted: Curve, bars: Sequence[Series] = ()
) -> Panel:
    """The finite values of each wanted metric by step, then `bars`."""
    found = []
    for index, (metric, label, colour) in enumerate(wanted):
        points = [(row["step"], row[metric]) for row in history if metric in row]
        points = [(step, value) for step, value in points if abs(value) < HUGE]  # not NaN either
        if points:
            steps, values = zip(*points, strict=True)
            palette = (SKY, GOLD, PINK, GREEN, BLUE, ORANGE)
            found.append(Series(label, colour or palette[index % len(palette)], steps, values))
    return Panel(title, unit, [*found, *bars])


def _bars(rows: Rows, metric: str, bounds: str, label: str) -> list[Series]:
    """The metric by step with bars from `bounds`_low to `bounds`_high, as no series or one."""
    keys = ("step", metric, f"{bounds}_low", f"{bounds}_high")
    points = [[row[key] for key in keys] for row in rows if all(k in row for k in keys)]
    if not points:
        return []
    steps, values, low, high = zip(*points, strict=True)
    return [Series(label, ORANGE, steps, values, low, high)]
