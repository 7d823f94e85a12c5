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
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
if str(REPO) not in sys.path:
    sys.path.append(str(REPO))

from tests.helpers.learning import (  # noqa: E402
    BUDGETS,
    KTO_CURVE,
    PREFERENCES,
    REACHED,
    SEEDS,
    final,
    learn,
    learn_preferences,
)


def draw(curves: dict[str, list[list[float]]], path: Path) -> None:
    """One small panel per preset: the three seeds' rewards over steps."""
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
            axis.plot(range(1, len(curve) + 1), curve, linewidth=1)
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
    curves: dict[str, list[list[float]]] = {preset: [] for preset in wanted}
    finals: dict[str, list[float]] = {preset: [] for preset in wanted}
    for seed in options.seeds:
        for preset, (curve, end) in one_seed(wanted, seed).items():
            curves[preset].append(curve)
            finals[preset].append(round(end, 3))
    if options.picture:
        draw(curves, options.picture)
    print(json.dumps(finals))


def one_seed(presets: Sequence[str], seed: int) -> dict[str, tuple[list[float], float]]:
    """Curve and final figure of each preset: reward, or pairs ranked right where there is none."""
    found: dict[str, tuple[list[float], float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        budgets = {name: BUDGETS[name] for name in presets if name in BUDGETS}
        if budgets:
            learned = learn(Path(folder), budgets, seed)
            for name in budgets:
                curve = learned.history(name, "reward/mean")
                found[name] = (curve, final(curve))
    preferences = [name for name in presets if name in PREFERENCES]
    if preferences:
        with tempfile.TemporaryDirectory() as folder:
            learned = learn_preferences(Path(folder), seed)
            for name in preferences:
                curve = learned.history(name, "rewards/accuracy" if name != "kto" else KTO_CURVE)
                found[name] = (curve, learned.metric(name, "pref/held_out_pair_accuracy"))
    return found


if __name__ == "__main__":
    main()
