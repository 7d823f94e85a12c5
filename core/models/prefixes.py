"""Prefix sharing: equal prefixes of rows are found and computed once.

In a causal model a token's state depends on it and on what came before it, so rows that begin alike
(by a system prompt, by the question of their group, by the same first words of an answer) have
these states in common. Source: this project; a prompt that a group shares is the case that peers
know. Axes: S tokens, N rows, W columns.

A group's responses begin alike, those of a policy that is sure of itself more so. What a model
makes of the same tokens is the same, so they take one row: the first token of all comes from their
prompt's row, and a row splits when its responses draw different tokens. Every response still draws
by its own random numbers. Axes: n responses that have not ended, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Above any token id.
MOST_WORDS = 2**31


def pair_keys(places: Tensor, ids: Tensor) -> Tensor:
    """A number (int64) for each pair; places are below 2^32, -1 is one too."""
    return places * MOST_WORDS + ids


def pairs_of(keys: Tensor) -> tuple[Tensor, Tensor]:
    """The places (0 or more) and ids that `keys` are made of."""
    return keys // MOST_WORDS, keys % MOST_WORDS


def first_alike(
    token_ids: Tensor, prompt_places: Tensor, own_places: Tensor, row_to_prompt: Tensor
) -> Tensor:
    """For each token of `token_ids` [S] the first of them with the same history, maybe itself.

    `prompt_places` [P, L] and `own_places` [B, R] are the tokens of prompts and of the responses
    to them, -1 where a row has ended; S is in the order of both. A response is not looked for in
    prompts.
    """
    first = torch.arange(len(token_ids))
    _merge(first, token_ids, prompt_places, torch.full((len(prompt_places),), -1))
    lengths = (prompt_places >= 0).sum(dim=1)
    ends = first[prompt_places.gather(1, (lengths - 1)[:, None]).squeeze(1)]
    _merge(first, token_ids, own_places, ends[row_to_prompt])
    return first


def depth_first(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers [S] of the S tokens of `rows` [N, W], and the largest number below each, int32.

    A row is a history from its start; -1 stands where it has none. Histories make a tree, walked
    depth first: token k is in the history of q where number[k] <= number[q] <= last[k].
    """
    # Sorted, rows that begin alike are neighbours: what follows a token has numbers without a gap.
    walked = torch.unique(rows, dim=0)
    tokens, count = walked.flatten(), int(walked.max()) + 1
    numbers = torch.arange(len(tokens))
    ends = (numbers // walked.shape[1] + 1) * walked.shape[1] - 1  # of their rows
    at = tokens.clamp(min=0)
    numbers = torch.where(tokens >= 0, numbers, len(tokens))
    ends = torch.where(tokens >= 0, ends, -1)
    first = torch.full((count,), len(tokens)).scatter_reduce(0, at, numbers, "amin")
    last = torch.full((count,), -1).scatter_reduce(0, at, ends, "amax")
    return first.int(), last.int()


def distinct_states(places: Tensor) -> tuple[Tensor, Tensor]:
    """The first [M] of R tokens to follow each state, and for each [R] which state it follows.

    `places` [R] are those of the states before them.
    """
    distinct, like = torch.unique(places, return_inverse=True)
    every = torch.arange(len(places), device=places.device)
    # The first of each, whatever the device: others only differ by rounding.
    first = every.new_full((len(distinct),), len(places)).scatter_reduce(0, like, every, "amin")
    return first, like


def _merge(first: Tensor, token_ids: Tensor, places: Tensor, before: Tensor) -> None:
    """Fill `first` for rows of `places` [N, W] that follow the tokens `before` [N]."""
    rows = torch.arange(len(places))
    for column in places.t():
        rows = rows[column[rows] >= 0]
        tokens = column[rows]
        histories = pair_keys(before[rows], token_ids[tokens])
        _, index, group = np.unique(histories.numpy(), return_index=True, return_inverse=True)
        if len(index) == len(rows):
            return  # rows that differ stay different
        alike = tokens[torch.from_numpy(index)[torch.from_numpy(group)]]
        first[tokens] = alike
        before[rows] = alike


# Dropping or splitting rows copies what they remember: for the ended ones alone it is worth that
# once they are a quarter.
DROP_BELOW = 0.75


@dataclass(frozen=True, slots=True)
class NextRows:
    """What is fed next: `ids` [R], and which row each response [n] is in.

    `of` [R] are the rows whose memory these take over; None where each keeps its own.
    """

    ids: Tensor
    rows: Tensor
    of: Tensor | None


def next_rows(rows: Tensor, ids: Tensor, num_rows: int) -> NextRows:
    """The rows after the responses in `rows` [n], of `num_rows`, have each drawn a token `ids` [n].

    Rows of a prompt's responses stay next to each other if they were.
    """
    fed, index = torch.unique(pair_keys(rows, ids), return_inverse=True)
    of, own = pairs_of(fed)
    is_split = bool((of[1:] == of[:-1]).any())
    if is_split or len(of) <= DROP_BELOW * num_rows:
        return NextRows(own, index, of)
    # Rows whose responses have all ended go on with any token; nobody reads what comes of it.
    all_ids = own.new_zeros(num_rows).index_copy(0, of, own)
    return NextRows(all_ids, rows, None)
