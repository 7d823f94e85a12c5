"""The learning curves that a stage saves, as a PNG and as one HTML page that loads nothing.

Curves and plots here are tables of metrics; `dashboard` has tables of its own of the same kind.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric in a chart; `bounds` are the metrics of its lower and upper bound."""

    metric: str
    label: str
    colour: str = ""
    bounds: tuple[str, str] = ("", "")

    def series(self, rows: Rows) -> list[Series]:
        """The finite values of the metric by step with its bounds; none without any value."""
        rows = [row for row in rows if self.metric in row]
        rows = [row for row in rows if abs(row[self.metric]) < HUGE]  # not NaN either
        if not rows:
            return []
        steps, values = zip(*((row["step"], row[self.metric]) for row in rows), strict=True)
        low, high = self.bounds
        if not low or not any(low in row for row in rows):
            return [Series(self.label, self.colour, steps, values)]
        lows, highs = (tuple(row.get(name) for row in rows) for name in (low, high))
        return [Series(self.label, self.colour, steps, values, lows, highs)]


@dataclass(frozen=True, slots=True)
class Plot:
    """One chart: curves of one unit."""

    title: str
    unit: str
    curves: Sequence[Curve]
    robust: bool = False
    smooth: bool = True

    def panel(self, rows: Rows, more: Sequence[Series] = ()) -> Panel:
        """What `rows` have of the curves, then `more`."""
        found = [series for curve in self.curves for series in curve.series(rows)]
        return Panel(self.title, self.unit, [*found, *more])


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

GREEDY = Curve(
    "eval/greedy_accuracy",
    "held-out, greedy, 95 % interval",
    ORANGE,
    ("eval/greedy_low", "eval/greedy_high"),
)
TRAINED_ON = Curve("acc/mean", "training batch, sampled", BLUE)
ENTROPY = Plot("Entropy", "nats per token", [Curve("entropy/mean", "policy", BLUE)])
KL = Plot(
    "KL divergence (k3)",
    "nats per token",
    [
        Curve("kl/old_k3", "from the rollout's policy", BLUE),
        Curve("kl/ref_k3", "from the reference", ORANGE),
        Curve("mismatch/k3", "engine against trainer", GREEN),
    ],
    robust=True,
)


def learning_panels(history: Rows, evaluations: Rows) -> list[Panel]:
    """The six panels of a learning curve, and those of what only some stages have.

    Rows of `history` and `evaluations` hold "step" and metrics by name; missing ones leave gaps.
    """
    names = {name for row in history for name in row}
    parts = _each(COMPONENT, names, (SKY, GOLD, PINK, GREEN, BLUE, ORANGE))
    total = Curve("reward/mean", "total", BLACK)
    length = [Curve("resp_len/max", "longest", SKY), Curve("resp_len/mean", "mean", BLUE)]
    clipped = [
        Curve("clip/high_frac", "upper bound", ORANGE),
        Curve("clip/low_frac", "lower bound", BLUE),
    ]
    accuracy = Plot("Accuracy", "fraction correct", [TRAINED_ON])
    others = [plot.panel(history) for plot in occasional_plots(names)]
    return [
        # A single component is the total.
        Plot("Reward", "reward", [*parts, total] if len(parts) > 1 else [total]).panel(history),
        accuracy.panel(history, GREEDY.series(evaluations)),
        ENTROPY.panel(history),
        Plot("Response length", "tokens", length).panel(history),
        KL.panel(history),
        Plot("Clipped tokens", "fraction of tokens", clipped).panel(history),
        *(panel for panel in others if panel.series),
    ]


def occasional_plots(names: Collection[str]) -> list[Plot]:
    """Of samplers that remember, teachers, and what environments write; those among `names`."""
    bands = (("below", SKY), ("inside", GREEN), ("above", ORANGE))
    known = [Curve(f"curriculum/known_frac/{b}", f"{b} the band", colour) for b, colour in bands]
    rates = [Curve(f"curriculum/pass_rate/{b}", f"{b} the band", colour) for b, colour in bands]
    tasks = (BLUE, ORANGE, GREEN, SKY, BLACK)
    plots = [
        Plot(
            "Curriculum: problems by pass rate",
            "fraction",
            [*known, Curve("curriculum/unseen_frac", "unseen, of the batch", BLACK)],
        ),
        Plot(
            "Curriculum: accuracy by band",
            "fraction correct",
            [*rates, Curve("curriculum/pass_rate/unseen", "unseen", BLACK)],
        ),
        Plot("Tasks: shares", "fraction of the batch", _each("progress/share/", names, tasks)),
        Plot("Tasks: accuracy", "fraction correct", _each("acc/task/", names, tasks)),
        Plot(
            "From the teacher",
            "nats per token",
            [
                Curve("distil/rollout_kl", "KL of the policy, sampled", BLUE),
                Curve("distil/divergence", "divergence that is learned from", ORANGE),
            ],
        ),
        Plot(
            "Replayed groups",
            "fraction of the batch",
            [Curve("replay/taken_frac", "sampled before", BLUE)],
        ),
        Plot(
            "Observations (not sampled)",
            "nats per token",
            [Curve("observed/nll", "negative log-prob", BLUE)],
        ),
    ]
    return [plot for plot in plots if any(curve.metric in names for curve in plot.curves)]


def _each(prefix: str, names: Collection[str], colours: Sequence[str]) -> list[Curve]:
    """A curve for each of the names that begin so, in these colours in turn."""
    chosen = sorted(name for name in names if name.startswith(prefix))
    return [
        Curve(n, n.removeprefix(prefix), c) for n, c in zip(chosen, cycle(colours), strict=False)
    ]


def preference_panels(history: Rows, rankings: Rows) -> list[Panel]:
    """The six panels of learning from preferences; rows as in `learning_panels`."""
    bounds = ("pref/held_out_low", "pref/held_out_high")
    ranked = [
        series
        for what in ("pair", "row")
        for series in Curve(
            f"pref/held_out_{what}_accuracy", "held-out, 95 % interval", ORANGE, bounds
        ).series(rankings)
    ]
    pairs = [Curve("rewards/accuracy", "training batch, pairs", BLUE)]
    # How often both answers of a pair fall; single answers have no pair, but move as well.
    falling = Plot(
        "Both answers less likely than under the reference",
        "fraction of pairs",
        [Curve("pref/both_falling", "training batch", BLUE)],
    )
    moving = Plot(
        "Log-prob of the answers, less the reference's", "nats per answer", _both("logps/{}_delta")
    )
    of_pairs = falling.panel(history)
    return [
        Plot("Loss", "loss", [Curve("loss/preference", "training batch", BLUE)]).panel(history),
        Plot("Answers ranked right", "fraction", pairs).panel(history, ranked),
        Plot("Implied reward", "reward", _both("rewards/{}")).panel(history),
        Plot("Log-prob of the answers", "nats per token", _both("logps/{}_per_token")).panel(
            history
        ),
        of_pairs if of_pairs.series else moving.panel(history),
        Plot("Gradient norm", "L2 norm", [Curve("grad/norm", "before clipping", BLUE)]).panel(
            history
        ),
    ]


def _both(metric: str) -> list[Curve]:
    return [
        Curve(metric.format("chosen"), "chosen", BLUE),
        Curve(metric.format("rejected"), "rejected", ORANGE),
    ]
