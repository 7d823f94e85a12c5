"""Turns of an episode: which tokens are whose, returns over turns, groups of turns.

`turn_end` [B, S] is the token index that ends each turn of the policy, -1 where there is none; a
row's turns are in order. Axes: B sequences, S padded turns, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from posttrain.core.math.groups import all_equal
from posttrain.core.math.masking import masked


def turn_of_token(turn_end: Tensor, width: int) -> Tensor:
    """The turn [B, T] that each token is in: the first that ends at it or later; -1 after the last.

    Tokens between two turns, an observation's, count to the later one.
    """
    ends = torch.where(turn_end >= 0, turn_end, torch.full_like(turn_end, width))
    tokens = torch.arange(width).expand(len(ends), width).contiguous()
    found = torch.searchsorted(ends.contiguous(), tokens)
    exists = (turn_end >= 0).sum(dim=1, keepdim=True)
    return torch.where(found < exists, found, torch.full_like(found, -1))


def sampled_turns(turn_end: Tensor, response_mask: Tensor) -> Tensor:
    """Whether each turn [B, S] has a token of `response_mask` [B, T].

    A turn that branches of an episode share has its tokens in the mask of one of them.
    """
    turns = turn_of_token(turn_end, response_mask.shape[1])
    own = masked(response_mask.long(), turns >= 0)
    counts = torch.zeros_like(turn_end).scatter_add_(1, turns.clamp(min=0), own)
    return (counts > 0) & (turn_end >= 0)


def on_tokens(values: Tensor, turn_end: Tensor, width: int) -> Tensor:
    """`values` [B, S] on the tokens [B, T] of their turns; 0 after the last turn."""
    turns = turn_of_token(turn_end, width)
    return masked(values.gather(1, turns.clamp(min=0)), turns >= 0)


def turn_returns(rewards: Tensor, turn_end: Tensor, gamma: float) -> Tensor:
    """G_s = r_s + gamma * G_{s+1} [B, S], float64, over the turns there are; a NaN reward is 0."""
    given = masked(rewards.double(), (turn_end >= 0) & rewards.isfinite())
    result, total = torch.zeros_like(given), given.new_zeros(len(given))
    for turn in reversed(range(given.shape[1])):
        total = given[:, turn] + gamma * total
        result[:, turn] = total
    return masked(result, turn_end >= 0)


def over_groups(
    values: Tensor,
    keys: Iterable[Tensor],
    valid: Tensor,
    score: Callable[[Tensor], Tensor],
    zero_tol: float,
) -> tuple[Tensor, list[int]]:
    """`score` of the valid `values` [B, S] in each group, and how large the groups are.

    Turns with equal `keys` ([B, S] each) are a group. Fewer than two turns, or such that are equal
    to `zero_tol`, get exactly 0, and so does what is not valid.
    """
    result = torch.zeros_like(values)
    names = torch.stack([key[valid] for key in keys], dim=1)
    scores, found = values[valid], torch.zeros_like(values[valid])
    if not len(scores):
        return result, []
    _, group, sizes = torch.unique(names, dim=0, return_inverse=True, return_counts=True)
    for number in range(len(sizes)):
        members = group == number
        if sizes[number] > 1 and not all_equal(scores[members], zero_tol):
            found[members] = score(scores[members])
    result[valid] = found
    return result, sizes.tolist()
