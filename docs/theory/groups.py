"""Group size: how often a group teaches nothing, and what normalising by the group does.

Exact, by summing over how many of G responses are right; advantages are the plugins' own.
"""

from __future__ import annotations

import math
from functools import cache

import torch

from posttrain.core.analysis.pictures import Panel, Series
from posttrain.core.analysis.svg import Chart
from posttrain.core.math.groups import leave_one_out, z_scores

SIZES = (2, 4, 8, 16, 64)
RATES = (0.01, 0.05, 0.1, 0.3, 0.5)
EPS = 1e-6
"""What GRPO adds to the deviation."""


def chance(right: int, size: int, rate: float) -> float:
    """Of so many right responses in a group."""
    return math.comb(size, right) * rate**right * (1 - rate) ** (size - right)


def silent(size: int, rate: float) -> float:
    """Of a group whose responses are all right or all wrong."""
    return chance(0, size, rate) + chance(size, size, rate)


@cache
def advantages(size: int, right: int, kind: str) -> tuple[float, float]:
    """Of a right and a wrong response in a group; 0 in one that is all equal."""
    if right in (0, size):
        return 0.0, 0.0
    rewards = torch.tensor([1.0] * right + [0.0] * (size - right), dtype=torch.float64)
    if kind == "grpo":
        found = z_scores(rewards, 1, EPS)
    elif kind == "rloo":
        others = torch.stack([rest.mean() for rest in leave_one_out(rewards)])
        found = rewards - others
    else:  # dr_grpo
        found = rewards - rewards.mean()
    return float(found[0]), float(found[-1])


def push(size: int, rate: float, kind: str) -> float:
    """Mean over groups of (1/G) sum of A_i d log pi_i / d logit, the logit of being right.

    The score of a right response is 1 - p, of a wrong one -p. Of the reward itself it is p (1 - p).
    """
    total = 0.0
    for right in range(1, size):
        good, bad = advantages(size, right, kind)
        each = (right * good * (1 - rate) - (size - right) * bad * rate) / size
        total += chance(right, size, rate) * each
    return total


def ideal(rate: float, kind: str) -> float:
    """The same for infinitely many responses: with GRPO divided by the true deviation."""
    variance = rate * (1 - rate)
    return math.sqrt(variance) if kind == "grpo" else variance


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _kept(kind: str) -> str:
    rows = [
        [f"{rate:.0%}", *(f"{push(size, rate, kind) / ideal(rate, kind):.2f}" for size in SIZES)]
        for rate in RATES
    ]
    return _table(["success", *(f"G = {size}" for size in SIZES)], rows)


def values() -> dict[str, str]:
    heads = ["success", *(f"G = {size}" for size in SIZES)]
    silent_rows = [
        [f"{rate:.0%}", *(f"{silent(size, rate):.0%}" for size in SIZES)] for rate in RATES
    ]
    weight = [
        [f"{rate:.0%}", f"{ideal(rate, 'dr_grpo'):.4f}", f"{ideal(rate, 'grpo'):.3f}"]
        for rate in RATES
    ]
    ratios = [ideal(0.5, kind) / ideal(0.01, kind) for kind in ("dr_grpo", "grpo")]
    return {
        "silent": _table(heads, silent_rows),
        "grpo": _kept("grpo"),
        "dr_grpo": _kept("dr_grpo"),
        "rloo": _kept("rloo"),
        "weight": _table(["success", "mean only: p(1-p)", "GRPO: its root"], weight),
        "plain_ratio": f"{ratios[0]:.0f}",
        "grpo_ratio": f"{ratios[1]:.0f}",
        "draws_1": f"{math.log(0.5) / math.log(0.99):.0f}",
        "silent_8": f"{silent(8, 0.05):.0%}",
    }


def charts() -> dict[str, Chart]:
    rates = [i / 100 for i in range(1, 100)]
    lines = [
        Series(f"G = {size}", "", rates, [silent(size, rate) for rate in rates]) for size in SIZES
    ]
    panel = Panel("Groups that are all right or all wrong", "share of groups", lines)
    return {"groups": Chart(panel, x="success rate of the problem", smooth=False, width=680)}
