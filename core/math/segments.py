"""Segments of responses, each with one importance ratio, and what stands behind a clipped token.

Axes: B responses, T tokens. A segment id counts from 0 within its response; ids under the mask are
ignored.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from posttrain.core.errors import RunError
from posttrain.core.math.masking import masked


def by_width(mask: Tensor, width: int) -> Tensor:
    """Ids [B, T] of segments of `width` masked tokens; a response's last may be shorter."""
    return (mask.bool().cumsum(dim=1) - 1).clamp(min=0) // width


def by_run(mask: Tensor) -> Tensor:
    """Ids [B, T] of the runs of masked tokens without a gap: the turns of an episode."""
    taken = mask.bool()
    before = torch.cat((torch.zeros_like(taken[:, :1]), taken[:, :-1]), dim=1)
    return ((taken & ~before).cumsum(dim=1) - 1).clamp(min=0)


def by_end(token_ids: Tensor, mask: Tensor, ends: Sequence[int]) -> Tensor:
    """Ids [B, T] of segments that each end with one of the tokens `ends`, or with the response."""
    ending = torch.isin(token_ids, torch.tensor(ends, device=token_ids.device))
    closes = (ending & mask.bool()).long()
    return closes.cumsum(dim=1) - closes


def segment_means(values: Tensor, mask: Tensor, segment: Tensor) -> Tensor:
    """At each masked token the mean of `values` [B, T] over its segment, float64; 0 elsewhere."""
    taken = mask.bool()
    ids = torch.where(taken, segment, 0)
    shape = (mask.shape[0], int(ids.max()) + 1 if ids.numel() else 1)
    sums = torch.zeros(shape, dtype=torch.float64).scatter_add(
        1, ids, masked(values, mask).double()
    )
    sizes = torch.zeros(shape, dtype=torch.float64).scatter_add(1, ids, taken.double())
    return masked((sums / sizes.clamp(min=1)).gather(1, ids), mask)


def segment_advantages(
    advantages: Tensor, mask: Tensor, segment: Tensor, *, take_mean: bool, who: str
) -> Tensor:
    """`advantages` [B, T] with one value per segment: as they are, or each segment's mean."""
    means = segment_means(advantages, mask, segment).to(advantages.dtype)
    if take_mean:
        return means
    spread = masked(advantages - means, mask).abs()
    if bool((spread > 1e-6 * means.abs().clamp(min=1)).any()):
        raise RunError(
            f"{who} has one importance ratio per segment, but the advantages differ between the "
            "tokens of a segment: use segment_by: turn if they are of turns, or adv_reduce: mean"
        )
    return advantages


def behind(clipped: Tensor) -> Tensor:
    """True at tokens [B, T] that follow one for which `clipped` is set, in the same response."""
    flags = clipped.bool().long()
    return flags.cumsum(dim=1) - flags > 0
