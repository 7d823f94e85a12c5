"""The estimates k1, k2 and k3 of a KL divergence: bias, deviation, and their gradients as a loss.

Everything is exact, by summing over a small vocabulary; the estimates are the plugins' own.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from posttrain.core.analysis.pictures import BLUE, GREEN, ORANGE, Panel, Series
from posttrain.core.analysis.svg import Chart
from posttrain.core.contracts import KlEstimator
from posttrain.core.plugin_manager import PluginManager

VOCABULARY = 50
TARGETS = (0.001, 0.01, 0.1, 0.5, 2.0)
NAMES = ("k1", "k2", "k3")
MANAGER = PluginManager()


@cache
def _logits() -> tuple[Tensor, Tensor]:
    """Of the reference, and of a direction in which the policy moves away from it."""
    draw = torch.Generator().manual_seed(0)
    first = 2 * torch.randn(VOCABULARY, generator=draw, dtype=torch.float64)
    return first, torch.randn(VOCABULARY, generator=draw, dtype=torch.float64)


def exact(policy: Tensor, reference: Tensor) -> Tensor:
    """KL(policy || reference) of log-probs [V], nats."""
    return (policy.exp() * (policy - reference)).sum()


@cache
def pair(target: float) -> tuple[Tensor, Tensor]:
    """Logits of the policy, and log-probs of the reference, that lie `target` nats apart."""
    start, direction = _logits()
    reference = start.log_softmax(0)
    low, high = 0.0, 20.0
    for _ in range(80):
        middle = (low + high) / 2
        apart = float(exact((start + middle * direction).log_softmax(0), reference))
        low, high = (middle, high) if apart < target else (low, middle)
    return start + high * direction, reference


def estimates(name: str, target: float) -> tuple[float, float]:
    """Mean and deviation of one sample's estimate."""
    logits, reference = pair(target)
    policy = logits.log_softmax(0)
    values_ = MANAGER.build(KlEstimator, name, {}).kl(policy, reference)
    mean = float((policy.exp() * values_).sum())
    second = float((policy.exp() * values_.square()).sum())
    return mean, math.sqrt(max(0.0, second - mean * mean))


def gradient(name: str, target: float) -> tuple[float, float]:
    """Cosine to the KL's gradient, and length over its, of the mean gradient as a loss."""
    start, reference = pair(target)
    logits = start.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(exact(logits.log_softmax(0), reference), logits)
    policy = logits.log_softmax(0)
    values_ = MANAGER.build(KlEstimator, name, {}).kl(policy, reference)
    # Tokens are sampled, so no gradient goes through their probability.
    (found,) = torch.autograd.grad((policy.detach().exp() * values_).sum(), logits)
    length = float(found.norm())
    if length < 1e-9 * float(wanted.norm()):
        return math.nan, 0.0
    return float(found @ wanted) / length / float(wanted.norm()), length / float(wanted.norm())


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def values() -> dict[str, str]:
    heads = ["KL", *(f"{name}" for name in NAMES)]
    means, spreads, gradients = [], [], []
    for target in TARGETS:
        found = {name: estimates(name, target) for name in NAMES}
        means.append([f"{target:g}", *(f"{found[n][0] / target - 1:+.1%}" for n in NAMES)])
        spreads.append([f"{target:g}", *(f"{found[n][1] / target:.2g}" for n in NAMES)])
        row = [f"{target:g}"]
        for name in NAMES:
            cosine, length = gradient(name, target)
            row.append("0" if length == 0 else f"{cosine:.3f}, {length:.2f}")
        gradients.append(row)
    k1 = estimates("k1", 0.01)[1] / 0.01
    k3 = estimates("k3", 0.01)[1] / 0.01
    return {
        "bias": _table(heads, [[*row] for row in means]),
        "spread": _table(heads, spreads),
        "gradients": _table(heads, gradients),
        "vocabulary": f"{VOCABULARY}",
        "k1_samples": f"{(k1 / 0.1) ** 2:,.0f}",
        "k3_samples": f"{(k3 / 0.1) ** 2:,.0f}",
    }


def charts() -> dict[str, Chart]:
    targets = [10 ** (-3 + i / 5) for i in range(18)]
    colours = {"k1": ORANGE, "k2": GREEN, "k3": BLUE}
    lines = [
        Series(name, colours[name], targets, [estimates(name, t)[1] / t for t in targets])
        for name in NAMES
    ]
    panel = Panel("Deviation of one sample's estimate, over the KL", "deviation / KL", lines)
    x = "KL, nats"
    return {"kl-estimators": Chart(panel, x=x, log_x=True, log_y=True, smooth=False, width=680)}
