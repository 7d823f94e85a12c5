"""Responses that have said the same decode as one row of the batch, until they differ.

A group's responses begin alike, those of a policy that is sure of itself more so. What a model
makes of the same tokens is the same, so they take one row: the first token of all comes from their
prompt's row, and a row splits when its responses draw different tokens. Every response still draws
by its own random numbers. Axes: n responses that have not ended, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.core.math.pair_keys import pair_keys, pairs_of

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
