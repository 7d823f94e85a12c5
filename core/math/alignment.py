"""Two tokenisations of one text side by side: the stretches that both of them cut out.

Axes: B rows, T tokens of one tokenisation, W at least the number of groups of a row, G groups of
all rows, M tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

NO_GROUP = -1
"""The group of a token that lies in no stretch."""
SMALLEST = 1e-8  # a token's probability in a product, at least


def align(first: Sequence[int], second: Sequence[int]) -> tuple[list[int], list[int]]:
    """The group of each token of two tokenisations, given the byte at which each token ends.

    Groups are numbered in order from 0, hold tokens of both sides, end at the same byte on both,
    and are as short as that allows. Tokens behind the last common end have `NO_GROUP`.
    """
    groups = [NO_GROUP] * len(first), [NO_GROUP] * len(second)
    start_1 = start_2 = i = j = count = 0
    while i < len(first) and j < len(second):
        if first[i] < second[j]:
            i += 1
        elif first[i] > second[j]:
            j += 1
        else:
            i, j = i + 1, j + 1
            groups[0][start_1:i] = [count] * (i - start_1)
            groups[1][start_2:j] = [count] * (j - start_2)
            start_1, start_2, count = i, j, count + 1
    return groups


@dataclass(frozen=True, slots=True)
class TokenGroups:
    """The tokens of G groups: of each the one that stands for it, and all others.

    `rows` and `columns` [G] are the places of the first; `other_rows`, `other_columns` and
    `other_group` [M] those of the rest, with the index of the group that each belongs to.
    """

    rows: Tensor
    columns: Tensor
    other_rows: Tensor
    other_columns: Tensor
    other_group: Tensor


def whole_groups(group: Tensor, mask: Tensor) -> Tensor:
    """Keys [G] = row * T + number, ascending, of the groups whose tokens all are in `mask` [B, T].

    `group` [B, T] has the number of each token's group, `NO_GROUP` where there is none.
    """
    width = group.shape[1]
    rows, columns = (group != NO_GROUP).nonzero(as_tuple=True)
    keys = rows * width + group[rows, columns]
    broken = keys[~mask.bool()[rows, columns]]
    found: Tensor = torch.unique(keys)
    return found[~torch.isin(found, broken)]


def members(group: Tensor, keys: Tensor, width: int, at: Literal["first", "last"]) -> TokenGroups:
    """The tokens in `group` [B, T] of the groups `keys` [G], made by `whole_groups` at a `width`.

    The token that stands for a group is the one `at` its beginning or end.
    """
    rows, columns = (group != NO_GROUP).nonzero(as_tuple=True)
    own = rows * width + group[rows, columns]
    kept = torch.isin(own, keys)
    rows, columns, own = rows[kept], columns[kept], own[kept]
    place = torch.searchsorted(keys, own)
    reduce: Literal["amin", "amax"] = "amin" if at == "first" else "amax"
    base = columns.new_zeros(len(keys)).scatter_reduce(
        0, place, columns, reduce, include_self=False
    )
    other = columns != base[place]
    return TokenGroups(keys // width, base, rows[other], columns[other], place[other])


def products(logprobs: Tensor, group: Tensor, count: int) -> Tensor:
    """The product [G] of the probabilities of each group's tokens, from `logprobs` [M]; 1 of none.

    `group` [M] is the group of each, `count` is G. A probability counts as 1e-8 at least, without
    gradient below.
    """
    floored = logprobs.clamp(min=torch.tensor(SMALLEST).log().item())
    return logprobs.new_zeros(count).index_add(0, group, floored).exp()
