"""GAE's lambda: how much of a reward reaches a token far before it, and what a critic's noise does.

Weights are read off the project's own `gae`, which is linear in rewards and values.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from posttrain.core.analysis.pictures import Panel, Series
from posttrain.core.analysis.svg import Chart
from posttrain.core.math.returns import ValuedSteps, gae

LAMBDAS = (1.0, 0.999, 0.99, 0.95, 0.9)
DISTANCES = (1, 10, 100, 1000)
NOISE, SPREAD, LENGTH = 0.1, 0.5, 100
"""Deviation of a value's error at each token, of the outcome, and tokens of the example."""
ALPHAS = (0.05, 1.0, 5.0)


def advantages(rewards: Tensor, values_: Tensor, lam: float) -> Tensor:
    """GAE without discount of rows that end with their last token."""
    steps = ValuedSteps(rewards, values_, torch.ones_like(rewards), torch.zeros(len(rewards)))
    return gae(steps, 1.0, lam)


def reach(lam: float, length: int) -> Tensor:
    """Share of a reward at the last token in the advantage of each token before it [T]."""
    rewards = torch.zeros(1, length, dtype=torch.float64)
    rewards[0, -1] = 1.0
    return advantages(rewards, torch.zeros_like(rewards), lam)[0]


def noise(lam: float, length: int) -> float:
    """Deviation of the first token's advantage from independent errors of all values."""
    errors = torch.eye(length, dtype=torch.float64)  # a row for each value that is wrong by 1
    per_value = advantages(torch.zeros_like(errors), errors, lam)[:, 0]
    return NOISE * float(per_value.square().sum().sqrt())


def adaptive(alpha: float, length: int) -> float:
    """VAPO's lambda by length, as `decoupled_gae` has it."""
    return max(0.0, 1 - 1 / (alpha * length))


def _share(value: float) -> str:
    return f"{value:.2g}" if value < 0.01 else f"{value:.3f}"


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def values() -> dict[str, str]:
    far = {lam: reach(lam, max(DISTANCES) + 1) for lam in LAMBDAS}
    rows = [
        [f"{lam:g}", *(_share(float(far[lam][-1 - n])) for n in DISTANCES), _half(lam)]
        for lam in LAMBDAS
    ]
    signal = [
        [
            f"{lam:g}",
            f"{SPREAD * float(reach(lam, LENGTH)[0]):.2g}",
            f"{noise(lam, LENGTH):.3f}",
            f"{SPREAD * float(reach(lam, LENGTH)[0]) / noise(lam, LENGTH):.2g}",
        ]
        for lam in LAMBDAS
    ]
    lengths = (100, 1000, 10_000)
    by_length = [
        [
            f"{alpha:g}",
            *(
                f"{adaptive(alpha, n):.5g}: {_share(adaptive(alpha, n) ** (n - 1))}"
                for n in lengths
            ),
        ]
        for alpha in ALPHAS
    ]
    return {
        "reach": _table(["lambda", *(f"{n} later" for n in DISTANCES), "halves after"], rows),
        "signal": _table(["lambda", "signal", "noise", "signal / noise"], signal),
        "by_length": _table(["alpha", *(f"{n:,} tokens" for n in lengths)], by_length),
        "noise": f"{NOISE:g}",
        "spread": f"{SPREAD:g}",
        "length": f"{LENGTH}",
        "lost": f"{1 - float(far[0.95][-101]):.1%}",
    }


def _half(lam: float) -> str:
    return "never" if lam == 1 else f"{math.log(0.5) / math.log(lam):.0f} tokens"


def charts() -> dict[str, Chart]:
    lines = []
    for lam in LAMBDAS:
        shares = reach(lam, 1001).flip(0)[1:]
        kept = [(n, float(v)) for n, v in enumerate(shares, 1) if v >= 1e-4]
        lines.append(Series(f"lambda {lam:g}", "", [n for n, _ in kept], [v for _, v in kept]))
    panel = Panel("Share of a reward that reaches a token before it", "share", lines)
    x = "tokens between them"
    return {"gae-lambda": Chart(panel, x=x, log_x=True, log_y=True, smooth=False, width=680)}
