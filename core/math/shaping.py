"""Terms that shape a reward, and running means of rewards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor


def soft_overlong(
    lengths: Tensor,
    *,
    max_length: int,
    cache: int,
    factor: float = 1.0,
    floor: float | None = -1.0,
) -> Tensor:
    """`factor` times the penalty [B], float64, of responses with `lengths` [B] tokens.

    0 up to max_length - cache, then falling in a straight line to -1 at max_length, and no further
    than `floor`; None lets the line go on (verl). With `cache` 0 it is 0 up to max_length and
    `floor` (or -1) beyond. Continuous at both ends otherwise.
    Source: DAPO, arXiv:2503.14476, eq. 13.
    """
    if not 0 <= cache <= max_length:
        raise ValueError(f"cache is {cache} tokens, expected 0 to max_length ({max_length})")
    excess = lengths.double() - (max_length - cache)
    if cache == 0:
        beyond = -1.0 if floor is None else floor
        return factor * torch.where(excess > 0, beyond, 0.0).double()
    penalty = (-excess / cache).clamp(max=0.0)
    return factor * (penalty if floor is None else penalty.clamp(min=floor))


def repetition_penalty(
    responses: Sequence[Sequence[int]], *, ngram: int = 3, penalty: float = 1.0
) -> Tensor:
    """-penalty (1 - distinct n-grams / n-grams) of each response's token ids; [B], float64.

    A response shorter than `ngram` has no n-gram and no penalty.
    Sources: arXiv:2502.03373, section 4.4; TRL 1.16, `get_repetition_penalty_reward`.
    """
    shares = []
    for ids in responses:
        grams = [tuple(ids[start : start + ngram]) for start in range(len(ids) - ngram + 1)]
        shares.append(1.0 - len(set(grams)) / len(grams) if grams else 0.0)
    return -penalty * torch.tensor(shares, dtype=torch.float64)


def resampling_weights(
    rewards: Tensor,
    method: Literal["pow", "max_min", "max_random"],
    power: float = 1.0,
) -> Tensor:
    """Weights [B] > 0, not normalised, to draw responses with `rewards` [B] again by (PF-PPO).

    `pow`: |R|^power. `max_min`: 1 at the largest and the smallest reward of the batch, else 0.
    `max_random`: 0.4 at the largest, else 0.1. Each plus 1e-8, so that every draw is possible.
    Sources: PF-PPO, arXiv:2409.06957; verl 0.9.1, `compute_pf_ppo_reweight_data`.
    """
    if method == "pow":
        weights = rewards.abs().pow(power)
    elif method == "max_min":
        weights = ((rewards == rewards.max()) | (rewards == rewards.min())).to(rewards.dtype)
    else:
        best = rewards == rewards.max()
        weights = torch.where(best, 0.4, 0.1).to(rewards.dtype)
    return weights + 1e-8


class RunningMoments:
    """Count, mean and sum of squared deviations of everything seen, updated batch by batch.

    Equal to the moments of all values at once. Sources: Welford (1962); merging of two parts: Chan,
    Golub and LeVeque (1979).
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.squares = 0.0  # sum of (value - mean)^2

    def update(self, values: Tensor) -> None:
        """Take in `values` [N]; none at all changes nothing."""
        added = values.numel()
        if added == 0:
            return
        part = values.detach().to(torch.float64)
        mean = float(part.mean())
        squares = float((part - mean).square().sum())
        total, apart = self.count + added, mean - self.mean
        self.squares += squares + apart**2 * self.count * added / total
        self.mean += apart * added / total
        self.count = total

    def std(self, ddof: int = 1) -> float:
        """The deviation of all values; NaN while there are no more than `ddof`."""
        if self.count <= ddof:
            return math.nan
        return math.sqrt(self.squares / (self.count - ddof))

    def state(self) -> dict[str, float]:
        return {"count": float(self.count), "mean": self.mean, "squares": self.squares}

    def load_state(self, state: Mapping[str, float]) -> None:
        if state:
            self.count = int(state["count"])
            self.mean, self.squares = float(state["mean"]), float(state["squares"])
