"""Does every preset learn? Each trains a tiny random model, on three seeds.

The runs are those of tests/helpers/learning.py.

python tests/bench/presets.py                     # all presets, three seeds, prints JSON
python tests/bench/presets.py --only dapo --seeds 0
python tests/bench/presets.py --picture docs/images/presets-learn.png
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
if str(REPO) not in sys.path:
    sys.path.append(str(REPO))

from tests.helpers.learning import (  # noqa: E402
    AT_ONCE,
    BUDGETS,
    PREFERENCES,
    REACHED,
    SEEDS,
    Learned,
    final,
    start,
    start_preferences,
)

Curve = list[tuple[int, float]]


def draw(curves: dict[str, list[Curve]], path: Path) -> None:
    """One small panel per preset: what each seed reached over its steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = 6
    rows = -(-len(curves) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(12, 1.7 * rows), sharey=True, squeeze=False
    )
    for axis in axes.flat[len(curves) :]:
        axis.axis("off")
    for axis, (preset, seeds) in zip(axes.flat, curves.items(), strict=False):
        for curve in seeds:
            axis.plot(*zip(*curve, strict=True), linewidth=1)
        axis.axhline(REACHED, color="grey", linewidth=0.6, linestyle=":")
        axis.set_title(preset, fontsize=9)
        axis.set_ylim(0, 1.03)
        axis.tick_params(labelsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def main() -> None:
    """Run, print one JSON line, and draw the curves if asked."""
    about = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument(
        "--only", nargs="*", choices=sorted({**BUDGETS, **PREFERENCES}), help="presets; all if none"
    )
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    parser.add_argument("--picture", type=Path, help="draw the curves into this file")
    options = parser.parse_args()
    wanted = options.only or [*BUDGETS, *PREFERENCES]
    curves: dict[str, list[Curve]] = {preset: [] for preset in wanted}
    finals: dict[str, list[float]] = {preset: [] for preset in wanted}
    greedy: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        runs = [under_way(pool, Path(folder), wanted, seed) for seed in options.seeds]
        for seed_runs in runs:
            for preset in wanted:
                curve, end = outcome(preset, *seed_runs)
                curves[preset].append(curve)
                finals[preset].append(round(end, 3))
                if preset in PREFERENCES:
                    greedy.setdefault(preset, []).append(greedy_accuracy(preset, seed_runs[1]))
    if options.picture:
        draw(curves, options.picture)
    print(json.dumps({"final": finals, "greedy": greedy}))


def under_way(
    pool: Executor, folder: Path, presets: Sequence[str], seed: int
) -> tuple[Future[Learned] | None, Future[Learned] | None]:
    """The runs of a seed that the presets need: of reinforcement learning, and of preferences."""
    budgets = {name: BUDGETS[name] for name in presets if name in BUDGETS}
    rl, pref = folder / f"rl{seed}", folder / f"preference{seed}"
    rl.mkdir()
    pref.mkdir()
    return (
        start(pool, rl, budgets, seed) if budgets else None,
        start_preferences(pool, pref, seed) if set(presets) & set(PREFERENCES) else None,
    )


def outcome(
    preset: str, rl: Future[Learned] | None, preference: Future[Learned] | None
) -> tuple[Curve, float]:
    """A preset's curve and final figure: reward, or unseen pairs ranked right."""
    if preset in BUDGETS:
        assert rl is not None
        curve = rl.result().curve(preset, BUDGETS[preset].metric)
        return curve, final([value for _, value in curve])
    assert preference is not None
    curve = preference.result().curve(preset, "pref/held_out_pair_accuracy")
    return curve, curve[-1][1]


def greedy_accuracy(preset: str, preference: Future[Learned] | None) -> float:
    """How often a preference preset's greedy answer to an unseen prompt is right."""
    assert preference is not None
    return preference.result().metric(f"evaluate_{preset}", "eval/greedy_accuracy")


if __name__ == "__main__":
    main()
