"""Divergences of two distributions given by log-probs, over a vocabulary or a few candidates.

S is the student and T the teacher. Axes: N tokens, V vocabulary, K candidates, M of either.
A log-prob may be -inf: a probability of exactly 0 contributes 0, and so does its gradient.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

Divergence = Literal["forward", "reverse", "jsd", "jeffreys"]
ABSENT = -1
"""The id of a candidate that is missing."""
LARGEST_MASS = -1e-7  # log of the candidates' mass, at most, so that the rest has a logarithm


def relative_entropy(log_p: Tensor, log_q: Tensor) -> Tensor:
    """sum_m p (log p - log q) [N] of `log_p` and `log_q` [N, M], which need not sum to 1."""
    p = log_p.exp()
    alive = p > 0
    gap = torch.where(alive, log_p, 0.0) - torch.where(alive, log_q, 0.0)
    return (p * gap).sum(dim=-1)


def divergence(log_s: Tensor, log_t: Tensor, kind: Divergence, share: float = 0.5) -> Tensor:
    """D [N] of `log_s` and `log_t` [N, M], which is 0 where they are equal and sum to 1.

    forward: KL(T || S). reverse: KL(S || T). jsd: b KL(T || M) + (1 - b) KL(S || M), b being
    `share` and M = (1 - b) S + b T. jeffreys: w KL(T || S) + (1 - w) KL(S || T), w being `share`.
    Source: the generalised Jensen-Shannon divergence of arXiv:2306.13649, section 2.
    """
    if kind == "forward":
        return relative_entropy(log_t, log_s)
    if kind == "reverse":
        return relative_entropy(log_s, log_t)
    if kind == "jeffreys":
        forward, reverse = relative_entropy(log_t, log_s), relative_entropy(log_s, log_t)
        return share * forward + (1 - share) * reverse
    mixture = (1 - share) * log_s.exp() + share * log_t.exp()
    log_m = torch.where(mixture > 0, mixture, 1.0).log()
    return share * relative_entropy(log_t, log_m) + (1 - share) * relative_entropy(log_s, log_m)


def gathered(logprobs: Tensor, ids: Tensor) -> Tensor:
    """`logprobs` [N, V] at `ids` [N, K]; -inf at absent candidates, without gradient."""
    present = ids != ABSENT
    found = logprobs.gather(1, ids.clamp(min=0))
    return torch.where(present, found, -torch.inf)


def union(*ids: Tensor) -> Tensor:
    """The candidates of all `ids` [N, K_i], each once; the places of repetitions are absent."""
    both = torch.cat(ids, dim=1).sort(dim=1, descending=True).values
    repeated = torch.zeros_like(both, dtype=torch.bool)
    repeated[:, 1:] = both[:, 1:] == both[:, :-1]
    return both.masked_fill(repeated, ABSENT)


def log_mass(logprobs: Tensor) -> Tensor:
    """log of the sum of probabilities [N, 1] over candidates [N, K], at most `LARGEST_MASS`."""
    # A logsumexp of nothing but -inf has no gradient; the sum itself has.
    total = logprobs.exp().sum(dim=-1, keepdim=True)
    tiny = torch.finfo(total.dtype).tiny
    return total.clamp(min=tiny).log().clamp(max=LARGEST_MASS)


def with_tail(logprobs: Tensor) -> Tensor:
    """`logprobs` [N, K] with a bucket [N, K + 1] for all that is not among the candidates.

    Where these have a mass above 1 - 1e-7, the bucket has no gradient.
    """
    return torch.cat([logprobs, torch.log(-torch.expm1(log_mass(logprobs)))], dim=-1)


def renormalised(logprobs: Tensor) -> Tensor:
    """`logprobs` [N, K] of the distribution given that a candidate is drawn."""
    return logprobs - torch.logsumexp(logprobs, dim=-1, keepdim=True)


def sorted_distance(first: Tensor, second: Tensor) -> Tensor:
    """sum |p_i - q_i| [N] of probabilities [N, V1] and [N, V2], each sorted and filled up with 0.

    Which token has which probability does not matter to it. Source: ULD, arXiv:2402.12030.
    """
    width = max(first.shape[1], second.shape[1])
    p, q = (
        pad(each.sort(dim=-1, descending=True).values, (0, width - each.shape[1]))
        for each in (first, second)
    )
    return (p - q).abs().sum(dim=-1)
