"""The KL coefficient beta: what the best policy under it earns, and what DPO still learns from.

A problem is answered rightly with probability p by the reference. Maximising reward - beta KL gives
each right answer exp(1 / beta) times the weight.
"""

from __future__ import annotations

import math

import torch

from posttrain.core.analysis.pictures import Panel, Series
from posttrain.core.analysis.svg import Chart
from posttrain.core.math.groups import sample_std

BETAS = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0)
RATES = (0.01, 0.1, 0.5)
DPO_BETAS = (0.01, 0.05, 0.1, 0.5)
WEIGHTS = (0.25, 0.05, 0.01)


def best(rate: float, beta: float) -> float:
    """Success rate of the policy that maximises reward - beta KL(policy || reference)."""
    # p exp(1/b) / (p exp(1/b) + 1 - p), without the overflow of exp(1/b).
    return 1 / (1 + (1 - rate) / rate * math.exp(-1 / beta))


def divergence(success: float, rate: float) -> float:
    """KL of a policy of that success rate from the reference, nats a response."""
    parts = ((success, rate), (1 - success, 1 - rate))
    return sum(a * math.log(a / b) for a, b in parts if a > 0)


def searched(rate: float, beta: float) -> float:
    """The same maximum, by trying success rates."""
    tried = (i / 100_000 for i in range(1, 100_000))
    return max(tried, key=lambda success: success - beta * divergence(success, rate))


def deviation(rate: float, size: int = 1000) -> float:
    """Deviation of a group's rewards, that GRPO divides by."""
    right = round(rate * size)
    return sample_std(torch.tensor([1.0] * right + [0.0] * (size - right), dtype=torch.float64), 1)


def pair_weight(margin: float, beta: float) -> float:
    """DPO's weight of a pair: sigmoid(-beta margin), margin in nats of log-ratio."""
    return 1 / (1 + math.exp(beta * margin))


def margin_at(weight: float, beta: float) -> float:
    """The margin at which a pair has this weight; 1/2 is where it starts."""
    return math.log(1 / weight - 1) / beta


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def values() -> dict[str, str]:
    reached = [
        [
            f"{beta:g}",
            *(
                f"{best(rate, beta):.1%}, {divergence(best(rate, beta), rate):.2f} nats"
                for rate in RATES
            ),
        ]
        for beta in BETAS
    ]
    pairs = [
        [f"{beta:g}", *(f"{margin_at(weight, beta):.0f}" for weight in WEIGHTS)]
        for beta in DPO_BETAS
    ]
    effective = [
        [f"{rate:.0%}", f"{deviation(rate):.3f}", f"{0.04 * deviation(rate):.4f}"] for rate in RATES
    ]
    return {
        "reached": _table(["beta", *(f"from {rate:.0%}" for rate in RATES)], reached),
        "pairs": _table(["beta", *(f"weight {weight:g}" for weight in WEIGHTS)], pairs),
        "effective": _table(["success", "deviation of rewards", "0.04 acts as"], effective),
        "formula": f"{best(0.1, 0.5):.4f}",
        "searched": f"{searched(0.1, 0.5):.4f}",
        "ceiling": f"{-math.log(0.01):.2f}",
        "half": f"{margin_at(0.05, 0.1):.0f}",
        "half_small": f"{margin_at(0.05, 0.01):.0f}",
    }


def charts() -> dict[str, Chart]:
    betas = [10 ** (-2 + i / 20) for i in range(41)]
    lines = [
        Series(f"reference right {rate:.0%}", "", betas, [best(rate, b) for b in betas])
        for rate in RATES
    ]
    panel = Panel("Success of the best policy under a KL term", "success rate", lines)
    return {"beta": Chart(panel, x="beta", log_x=True, smooth=False, width=680)}
