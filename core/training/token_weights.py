"""The gradient weight of each token of an optimizer step, heard in its backward pass.

The weight is d loss / d log-prob, the KL term in it. The backward pass of the loss computes it on
its way into the model, so that listening to it costs neither a pass nor a matrix product.
Axes: B rows of a mini-batch, T response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.math.masking import masked
from posttrain.core.training.metrics import MetricSums
from posttrain.core.training.objective import MicroLoss
from posttrain.core.training.ranks import ALONE, Ranks

BOUNDS = ("clip/high_frac", "clip/low_frac", "clip/dual_frac", "clip/frac")
"""Flags [B, T] of a loss that say that a bound acts on a token."""
LENGTHS, PLACES = ("short", "medium", "long"), ("early", "middle", "late")


class HeardWeights:
    """The weights of one optimizer step, put together from its micro-batches.

    `total` [B, T] is 0 where no micro-batch came. `bounded` [B, T] is 1 where a bound of a loss
    acts. Both are on the CPU.
    """

    def __init__(self, mini: RolloutBatch) -> None:
        self._mini = mini
        self.total = torch.zeros_like(mini.rollout_logprobs)
        self.bounded = torch.zeros_like(mini.rollout_logprobs)

    def listen(self, loss: MicroLoss, rows: Tensor) -> None:
        """Note the gradient that will arrive at the log-probs [n, T] of `rows` [n].

        To be called between the loss and its backward pass: who asks for gradients before, as the
        objective itself does, is not heard.
        """
        tokens = loss.tokens

        def hear(gradient: Tensor) -> None:
            self.total[rows] = gradient.detach().to(self.total)

        if loss.logprobs is not None and loss.logprobs.requires_grad:
            loss.logprobs.register_hook(hear)  # type: ignore[no-untyped-call]
        for name in BOUNDS:
            if name in tokens and tokens[name][0].dim() == 2:
                acts = masked(*tokens[name]).to(self.bounded)
                self.bounded[rows] = torch.maximum(self.bounded[rows], acts)

    def record(self, sums: MetricSums, ranks: Ranks = ALONE) -> None:
        """Add the figures of all ranks' tokens to `sums`, which are those of all ranks already."""
        self.total, self.bounded = ranks.add(self.total), ranks.add(self.bounded)
        figures = weight_figures(self.total, self.bounded, self._mini)
        if (largest := figures.pop("token_weight/max", None)) is not None:
            sums.add_largest("token_weight/max", largest)
        sums.add_means(figures)


def weight_figures(weights: Tensor, bounded: Tensor, batch: RolloutBatch) -> dict[str, float]:
    """The metrics `token_weight/*` of an optimizer step with `weights` [B, T].

    Quantiles and the mean that `peak` is measured in are over the tokens whose weight is not 0. A
    quantity that does not exist, such as a share of nothing, is left out.
    """
    tokens = batch.mask.bool()
    size = masked(weights.detach(), tokens).abs().double()
    values = size[tokens]
    if not values.numel():
        return {}
    felt = values[values > 0]
    found = {"token_weight/zero_frac": 1 - felt.numel() / values.numel()}
    if not felt.numel():
        return found
    total, largest = float(felt.sum()), float(felt.max())
    effective = total**2 / float(felt.square().sum())
    found |= {
        "token_weight/max": largest,
        "token_weight/p99": _quantile(felt, 0.99),
        "token_weight/p50": _quantile(felt, 0.5),
        "token_weight/peak": largest * felt.numel() / total,
        "token_weight/effective": effective,
        "token_weight/effective_frac": effective / values.numel(),
    }
    if (slope := length_slope(size, tokens)) is not None:
        found["token_weight/length_slope"] = slope
    for name, where in _parts(batch, tokens, bounded).items():
        found[f"token_weight/share/{name}"] = float(masked(size, where).sum()) / total
    return found


def _quantile(values: Tensor, share: float) -> float:
    """The smallest value that at least `share` of `values` [N] do not exceed."""
    place = -(-round(share * 1000) * values.numel() // 1000)
    return float(values.kthvalue(max(1, place)).values)


def _parts(batch: RolloutBatch, tokens: Tensor, bounded: Tensor) -> dict[str, Tensor]:
    """The parts [B, T] of the batch whose share is measured."""
    advantages = masked(batch.column("advantages"), tokens)
    parts = {
        "positive": advantages > 0,
        "negative": advantages < 0,
        "bounded": bounded.bool() & tokens,
    }
    third = length_thirds(tokens)
    parts |= {name: (third == i)[:, None] & tokens for i, name in enumerate(LENGTHS)}
    lengths = tokens.sum(dim=1, keepdim=True).clamp(min=1)
    place = 3 * (tokens.cumsum(dim=1) - 1) // lengths
    return parts | {name: (place == i) & tokens for i, name in enumerate(PLACES)}


def length_thirds(tokens: Tensor) -> Tensor:
    """0, 1 or 2: the third of the lengths' range in which each row [B] is; -1 if it is empty.

    The range goes from the shortest row with tokens to the longest. Rows that are all of one length
    are in the middle.
    """
    lengths = tokens.sum(dim=1)
    some = lengths > 0
    if not some.any():
        return torch.full_like(lengths, -1)
    least, most = lengths[some].min(), lengths.max()
    thirds = torch.ones_like(lengths)
    if most > least:
        thirds = (3 * (lengths - least) // (most - least)).clamp(0, 2)
    return torch.where(some, thirds, -1)


def length_slope(size: Tensor, tokens: Tensor) -> float | None:
    """Slope of ln(mean |weight| of a row's tokens) over ln(tokens), by least squares over rows.

    -1: a token of a response twice as long has half the weight; 0: length does not matter. `size`
    [B, T] are |weights|. None where all responses that have weight are equally long.
    """
    lengths, sums = tokens.sum(dim=1).double(), masked(size, tokens).sum(dim=1)
    rows = sums > 0
    x, y = lengths[rows].log(), (sums[rows] / lengths[rows]).log()
    x = x - x.mean()
    spread = float(x.square().sum())
    return float((x * y).sum()) / spread if len(x) > 1 and spread > 1e-12 else None
