"""Importance weights: variance, effective samples, and signs of estimates that come out wrong.

The log-ratio of a token is normal with variance v and mean -v/2, so weights have mean 1; n
independent tokens make a response whose log-ratio has variance n v. Its KL is n v / 2.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch

from posttrain.core.analysis.pictures import Panel, Series
from posttrain.core.analysis.svg import Chart
from posttrain.core.math.correction import effective_sample_size

PER_TOKEN = (1e-4, 1e-3, 5e-3, 2e-2)
"""KL in nats per token: `kl/old_k3` or `mismatch/k3` of a run."""
LENGTHS = (1, 10, 100, 1000)
EFFECT = 0.2
"""True mean of the estimated quantity, whose samples have variance 1."""
KLS = (0.0, 0.25, 0.5, 1.0, 2.0)
COUNTS = (8, 32, 128, 512, 2048)
TRIALS = 5_000
CAP = 2.0


def effective(kl: float) -> float:
    """Relative effective sample size of weights whose log has this KL: 1 / E[w^2] = exp(-2 KL)."""
    return math.exp(-2 * kl)


def weights(kl: float, shape: tuple[int, ...], draw: np.random.Generator) -> np.ndarray:
    """Weights with mean 1."""
    return np.exp(draw.normal(-kl, math.sqrt(2 * kl), shape))


@cache
def wrong_sign(kl: float, count: int, cap: float = math.inf) -> float:
    """How often the mean of `count` weighted samples has the wrong sign."""
    draw, wrong, done = np.random.default_rng(round(1000 * kl) + count), 0, 0
    while done < TRIALS:
        trials = min(TRIALS - done, max(1, 2_000_000 // count))
        values = draw.normal(EFFECT, 1.0, (trials, count))
        used = np.minimum(weights(kl, (trials, count), draw), cap)
        wrong += int(((used * values).mean(axis=1) < 0).sum())
        done += trials
    return wrong / TRIALS


def measured(kl: float, count: int = 200_000) -> float:
    """The effective sample size of drawn weights, by the function that makes `ess/seq`."""
    drawn = torch.from_numpy(weights(kl, (count,), np.random.default_rng(0)))
    return effective_sample_size(drawn)


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _percent(share: float) -> str:
    """Whole percents: the simulation is not more exact."""
    return f"{share:.0%}" if share >= 0.005 else "under 1%"


def values() -> dict[str, str]:
    effective_rows = [
        [f"{kl:g}", *(f"{effective(kl * n):.1%}" if kl * n < 8 else "0.0%" for n in LENGTHS)]
        for kl in PER_TOKEN
    ]
    sign_rows = [[f"{kl:g}", *(_percent(wrong_sign(kl, n)) for n in COUNTS)] for kl in KLS]
    capped = [[f"{kl:g}", *(_percent(wrong_sign(kl, n, CAP)) for n in COUNTS)] for kl in KLS]
    return {
        "effective": _table(["KL per token", *(f"n = {n}" for n in LENGTHS)], effective_rows),
        "signs": _table(["KL of a response", *(f"N = {n}" for n in COUNTS)], sign_rows),
        "capped": _table(["KL of a response", *(f"N = {n}" for n in COUNTS)], capped),
        "effect": f"{EFFECT:g}",
        "cap": f"{CAP:g}",
        "trials": f"{TRIALS:,}",
        "closed": f"{effective(0.5):.1%}",
        "measured": f"{measured(0.5):.1%}",
        "of_128": f"{128 * effective(1.0):.0f}",
        "alarm_kl": f"{-math.log(0.3) / 2:.2f}",
        "limit_1000": f"{-math.log(0.3) / 2 / 1000:.1e}".replace("e-0", "e-"),
    }


def charts() -> dict[str, Chart]:
    lines = [Series(f"KL {kl:g}", "", COUNTS, [wrong_sign(kl, n) for n in COUNTS]) for kl in KLS]
    panel = Panel("Estimates with the wrong sign", "share of estimates", lines)
    x = "weighted responses N"
    return {"importance-weights": Chart(panel, x=x, log_x=True, smooth=False, width=680)}
