"""A place and a token id as one number, so that equal pairs are equal numbers."""

from __future__ import annotations

from torch import Tensor

# Above any token id.
MOST_WORDS = 2**31


def pair_keys(places: Tensor, ids: Tensor) -> Tensor:
    """A number (int64) for each pair; places are below 2^32, -1 is one too."""
    return places * MOST_WORDS + ids


def pairs_of(keys: Tensor) -> tuple[Tensor, Tensor]:
    """The places (0 or more) and ids that `keys` are made of."""
    return keys // MOST_WORDS, keys % MOST_WORDS
