"""What top-k and top-p leave of a distribution: one rule, for drawing tokens and for judging them.

Axes: N rows, V vocabulary, W tokens looked at, best first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Tokens looked at first for top-p; a nucleus that is wider is searched for again in 8 x as many.
FIRST_NUCLEUS_WIDTH = 256
# Rows cut at once, so that what sorting takes is small next to a chunk of logits.
BLOCK_ROWS = 64


@dataclass(frozen=True, slots=True)
class Cut:
    """Top-k, then top-p, of a distribution; `top_k` 0 and `top_p` 1 are off."""

    top_k: int = 0
    top_p: float = 1.0

    def __bool__(self) -> bool:
        return self.top_k > 0 or self.top_p < 1


def nucleus(scores: Tensor, cut: Cut) -> tuple[Tensor, Tensor]:
    """Scores [N, W] of `scores` [N, V], best first and -inf beyond the cut, and token ids [N, W].

    top-p keeps the fewest tokens whose probability (after top-k) reaches it, at least one.
    """
    vocabulary = scores.shape[-1]
    width = min(cut.top_k or FIRST_NUCLEUS_WIDTH, vocabulary)
    while True:
        best = scores.topk(width, dim=-1)
        base = best.values if cut.top_k else scores
        probabilities = (best.values - base.logsumexp(dim=-1, keepdim=True)).exp()
        mass = probabilities.cumsum(dim=-1, dtype=torch.float64)
        wide_enough = cut.top_k or width == vocabulary or mass[:, -1].min() >= cut.top_p
        if wide_enough:
            break
        width = min(8 * width, vocabulary)
    beyond = mass - probabilities >= cut.top_p if cut.top_p < 1 else mass < 0
    return best.values.masked_fill(beyond, float("-inf")), best.indices


def log_kept_mass(logprobs: Tensor, targets: Tensor, cut: Cut) -> Tensor:
    """Log of the probability [N] that a cut keeps, of `logprobs` [N, V] over the whole vocabulary.

    `targets` [N] were sampled, so they are in the support: one beyond the cut is kept next to it. A
    target's log-prob under the cut distribution is its log-prob less this.
    """
    rows = zip(torch.split(logprobs, BLOCK_ROWS), torch.split(targets, BLOCK_ROWS), strict=True)
    parts = []
    for block, ids in rows:
        values, _ = nucleus(block, cut)
        # Values, not ids: which of several equal scores a sort puts last is arbitrary.
        last = torch.where(values.isinf(), values.new_tensor(float("inf")), values).amin(dim=-1)
        own = block.gather(-1, ids[:, None]).squeeze(-1)
        kept = values.logsumexp(dim=-1)
        parts.append(torch.where(own < last, torch.logaddexp(kept, own), kept))
    return torch.cat(parts) if parts else logprobs.new_zeros(0)
