"""The dashboard of an rl stage: its curves in the groups in which they are read, with its alarms.

One HTML page that loads nothing, in light and dark. The pointer shows all values of a step, in all
charts at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from posttrain.core.analysis.alarms import RULES, Raised
from posttrain.core.analysis.charts_page import Section, charts_page
from posttrain.core.analysis.learning_curves import (
    COMPONENT,
    ENTROPY,
    GREEDY,
    KL,
    TRAINED_ON,
    Curve,
    Plot,
    Rows,
    occasional_plots,
)
from posttrain.core.analysis.pictures import (
    BLACK,
    BLUE,
    GOLD,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    SKY,
)
from posttrain.core.analysis.report import escaped
from posttrain.core.analysis.svg import Chart, Mark, stretches
from posttrain.core.config.rl_stage import RlStage

MOST_CURVES = 6
"""Curves of one chart, where their number is not known before."""


@dataclass(frozen=True, slots=True)
class Group:
    """Charts that answer a question together."""

    title: str
    question: str
    plots: Sequence[Plot]


GROUPS: tuple[Group, ...] = (
    Group(
        "Reward and held-out accuracy",
        "Does the reward rise, and does what is asked rise with it?",
        (
            Plot("Reward", "reward", (Curve("reward/mean", "mean", BLACK),)),
            Plot("Accuracy", "fraction correct", (TRAINED_ON, GREEDY)),
        ),
    ),
    Group(
        "Entropy and KL",
        "Does the policy still explore, and how far has it moved?",
        (ENTROPY, KL),
    ),
    Group(
        "Length and truncation",
        "Do responses grow, shrink, or meet the limit?",
        (
            Plot(
                "Response length",
                "tokens",
                (
                    Curve("resp_len/max", "longest", SKY),
                    Curve("resp_len/mean", "mean", BLUE),
                    Curve("resp_len/min", "shortest", GREY),
                ),
            ),
            Plot(
                "Truncated and repeated",
                "fraction of responses",
                (
                    Curve("resp_len/truncated_frac", "cut by the limit", ORANGE),
                    Curve("sampling/duplicate_frac", "repeat one of their group", BLUE),
                ),
            ),
        ),
    ),
    Group(
        "Clipping, ratios, gradient",
        "Are the steps of a sensible size?",
        (
            Plot(
                "Clipped tokens",
                "fraction of tokens",
                (
                    Curve("clip/high_frac", "upper bound", ORANGE),
                    Curve("clip/low_frac", "lower bound", BLUE),
                    Curve("clip/frac", "either", GREY),
                ),
            ),
            Plot(
                "Probability ratio",
                "new over old",
                (
                    Curve("ratio/max", "largest", ORANGE),
                    Curve("ratio/mean", "mean", BLACK),
                    Curve("ratio/min", "smallest", BLUE),
                ),
                robust=True,
            ),
            Plot(
                "Gradient", "L2 norm", (Curve("grad/norm", "before clipping", BLUE),), robust=True
            ),
            Plot(
                "Effective sample size",
                "fraction",
                (
                    Curve("ess/seq", "weights of responses", ORANGE),
                    Curve("ess/token", "weights of tokens", BLUE),
                ),
            ),
        ),
    ),
    Group(
        "Groups without signal",
        "How much of what is sampled teaches anything?",
        (
            Plot(
                "Groups with equal rewards",
                "fraction of groups",
                (
                    Curve("group/zero_adv_frac", "no gradient", BLACK),
                    Curve("group/all_correct_frac", "all right", GREEN),
                    Curve("group/all_wrong_frac", "all wrong", ORANGE),
                ),
            ),
            Plot(
                "Advantages",
                "advantage",
                (
                    Curve("adv/std", "standard deviation", BLUE),
                    Curve("adv/max_abs", "largest", SKY),
                ),
                robust=True,
            ),
        ),
    ),
    Group(
        "Token weights",
        "Which tokens does the gradient come from?",
        (
            Plot(
                "Largest weight over the mean",
                "ratio",
                (Curve("token_weight/peak", "peak", BLUE),),
                robust=True,
            ),
            Plot(
                "Tokens that count",
                "fraction of tokens",
                (
                    Curve("token_weight/effective_frac", "effective number", BLUE),
                    Curve("token_weight/zero_frac", "without weight", GREY),
                    Curve("token_weight/share/bounded", "share where a bound acts", ORANGE),
                ),
            ),
            Plot(
                "Weight by sign of the advantage",
                "share of |weight|",
                (
                    Curve("token_weight/share/positive", "above 0", GREEN),
                    Curve("token_weight/share/negative", "below 0", ORANGE),
                ),
            ),
            Plot(
                "Weight by length of the response",
                "share of |weight|",
                (
                    Curve("token_weight/share/short", "short", SKY),
                    Curve("token_weight/share/medium", "medium", BLUE),
                    Curve("token_weight/share/long", "long", ORANGE),
                ),
            ),
            Plot(
                "Weight by place in the response",
                "share of |weight|",
                (
                    Curve("token_weight/share/early", "first third", SKY),
                    Curve("token_weight/share/middle", "second", BLUE),
                    Curve("token_weight/share/late", "last", ORANGE),
                ),
            ),
            Plot(
                "Weight of a token by length",
                "slope of logarithms; -1: twice as long, half",
                (Curve("token_weight/length_slope", "slope", BLUE),),
                robust=True,
            ),
        ),
    ),
    Group(
        "Critic",
        "Does the value model explain the returns?",
        (
            Plot("Explained variance", "fraction", (Curve("value/ev", "before its update", BLUE),)),
            Plot("Loss of the critic", "loss", (Curve("loss/value", "value", BLUE),), robust=True),
        ),
    ),
    Group(
        "Speed",
        "Where does the time go?",
        (
            Plot(
                "Seconds of a step",
                "s",
                (
                    Curve("time/step_s", "whole step", BLACK),
                    Curve("time/rollout_s", "rollout", BLUE),
                    Curve("time/rollout_wait_s", "waiting for rollouts", SKY),
                    Curve("time/score_s", "rewards", GREEN),
                    Curve("time/update_s", "update", ORANGE),
                    Curve("time/sync_s", "weight sync", PINK),
                    Curve("time/evaluate_s", "evaluation", GOLD),
                ),
                robust=True,
            ),
            Plot(
                "Throughput",
                "response tokens a second",
                (
                    Curve("throughput/rollout_tokens_per_s", "sampled", BLUE),
                    Curve("throughput/update_tokens_per_s", "trained on", ORANGE),
                ),
                robust=True,
            ),
        ),
    ),
)


def dashboard_page(history: Rows, raised: Sequence[Raised], title: str, about: str = "") -> str:
    """The page. Rows hold "step" and metrics by name; charts without any value are left out."""
    marks = {alarm.name: Mark(i + 1, alarm.steps) for i, alarm in enumerate(raised)}
    sections = []
    for group in groups_of({name for row in history for name in row}):
        charts = []
        for plot in group.plots:
            panel = plot.panel(history)
            if panel.series:
                names = [curve.metric for curve in plot.curves]
                chosen = [mark for name, mark in marks.items() if _is_on(name, names)]
                charts.append(Chart(panel, chosen, robust=plot.robust, smooth=plot.smooth))
        sections.append(Section(charts, group.title, group.question))
    return charts_page(sections, title, about=about, top=_alarms(raised), note=_NOTE)


_NOTE = (
    "Faint lines: every step; strong lines from ten steps on: mean of the nearest tenth, for KL, "
    "ratios, gradient and time their median. Bars and bands: 95 % intervals. Red: steps at which "
    "the alarm of that number went off."
)


# --- which charts ---------------------------------------------------------------------------------


def groups_of(names: Collection[str]) -> Iterator[Group]:
    """The groups, with the plots that depend on which metrics a stage has."""
    first, *others = GROUPS
    reward, *more = first.plots
    parts = sorted(name for name in names if name.startswith(COMPONENT))
    if len(parts) > 1:  # a single component is the total
        curves = [Curve(name, name.removeprefix(COMPONENT)) for name in parts[:MOST_CURVES]]
        reward = replace(reward, curves=(*curves, *reward.curves))
    yield replace(first, plots=(reward, *more, *_at_k(names)))
    yield from others
    about = "What its sampler, teachers and environment record."
    yield Group("Of this stage", about, occasional_plots(names))


def _at_k(names: Collection[str]) -> Iterator[Plot]:
    """avg@k and pass@k of sampled answers, the largest k with its interval."""
    sizes = sorted(
        int(name.rpartition("/")[2]) for name in names if name.startswith("eval/pass_at/")
    )
    if not sizes:
        return
    k = sizes[-1]

    def curve(name: str, size: int, label: str, colour: str) -> Curve:
        bounds = (f"eval/{name}_low/{size}", f"eval/{name}_high/{size}")
        return Curve(f"eval/{name}/{size}", label, colour, bounds)

    yield Plot(
        f"avg@{k} and pass@{k}, held-out",
        "fraction correct",
        (
            curve("avg_at", k, f"avg@{k}, 95 % interval", BLUE),
            curve("pass_at", k, f"pass@{k}, 95 % interval", ORANGE),
        ),
    )
    shown_sizes = sizes[-MOST_CURVES:]
    yield Plot(
        "pass@k by k, held-out",
        "fraction solved",
        tuple(Curve(f"eval/pass_at/{size}", f"pass@{size}") for size in shown_sizes),
        smooth=False,
    )


def _is_on(alarm: str, metrics: Sequence[str]) -> bool:
    wanted = RULES[alarm].curves if alarm in RULES else ()
    return any(m == w or (w.endswith("/") and m.startswith(w)) for m in metrics for w in wanted)


# --- pieces of the page ---------------------------------------------------------------------------


def _alarms(raised: Sequence[Raised]) -> str:
    """The alarms with their numbers; that there were none is said too."""
    if not raised:
        return "<p class='none'>No alarm was raised.</p>"
    rows = []
    for number, alarm in enumerate(raised, 1):
        parts = [str(a) if a == b else f"{a} to {b}" for a, b in stretches(alarm.steps)]
        steps = ", ".join(parts[:4]) + (" and later" if len(parts) > 4 else "")
        where = "step" if len(alarm.steps) == 1 else "steps"
        text = f": {escaped(alarm.text)}" if alarm.text else ""
        rows.append(
            f"<li><span>{number}</span><b>{escaped(alarm.name)}</b>, {where} {steps}{text}</li>"
        )
    return f"<ul class='alarms'>{''.join(rows)}</ul>"


def about_stage(stage: RlStage, done: int) -> str:
    """What the page says of the stage, of which `done` steps are."""
    return (
        f"{stage.algorithm.name}, {done} of {stage.steps} steps, {stage.prompts_per_step} prompts "
        f"x {stage.num_generations} responses each"
    )


def write_dashboard(
    history: Rows, raised: Sequence[Raised], title: str, about: str, folder: Path
) -> Path:
    """Write `folder`/dashboard.html."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "dashboard.html"
    path.write_text(dashboard_page(history, raised, title, about), "utf-8")
    return path
