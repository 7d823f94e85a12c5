"""Small preference batches for tests of the maths, and losses of one pair."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.core.contracts import PairLoss, PairScores
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.training.preference_objective import PairTokens

MANAGER = PluginManager()


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def pairs(
    u: Tensor,
    v: Tensor,
    *,
    ref: tuple[float, float] = (-3.0, -4.0),
    tokens: tuple[float, float] = (4.0, 5.0),
    margin: float = 0.0,
) -> PairScores:
    """Scores of pairs whose log-ratios are `u` and `v`; all have one reference and one length."""
    ones = torch.ones_like(u)
    chosen = u + ref[0]
    return PairScores(
        chosen=u,
        rejected=v,
        margin=margin * ones,
        chosen_logps=chosen,
        rejected_logps=v + ref[1],
        ref_chosen_logps=ref[0] * ones,
        ref_rejected_logps=ref[1] * ones,
        chosen_tokens=tokens[0] * ones,
        rejected_tokens=tokens[1] * ones,
        chosen_nll=-chosen,
        num_pairs=float(len(u)),
        num_chosen_tokens=tokens[0] * len(u),
    )


def pair_loss(name: str, u: float, v: float, **fields: object) -> float:
    """The loss of one pair."""
    loss = MANAGER.build(PairLoss, name, fields)
    return float(loss.pair_loss(pairs(column(u), column(v))))


def gradients(name: str, u: float, v: float, **fields: object) -> tuple[float, float]:
    """Gradients of one pair's loss in u and v."""
    loss = MANAGER.build(PairLoss, name, fields)
    chosen, rejected = column(u).requires_grad_(), column(v).requires_grad_()
    value = loss.pair_loss(pairs(chosen, rejected)).sum()
    grads = torch.autograd.grad(value, (chosen, rejected), materialize_grads=True)
    return grads[0].item(), grads[1].item()


def mask_of(*lengths: int, width: int = 5) -> Tensor:
    return (torch.arange(width)[None, :] < torch.tensor(lengths)[:, None]).double()


def made_pairs(fill: float = 0.0, seed: int = 0) -> PairTokens:
    """Three ragged pairs; `fill` lies under every mask."""
    noise = torch.Generator().manual_seed(seed)
    masks = mask_of(5, 2, 1), mask_of(3, 4, 1)

    def logprobs(mask: Tensor) -> Tensor:
        values = -torch.rand(mask.shape, generator=noise, dtype=torch.float64)
        return torch.where(mask.bool(), values, torch.full_like(values, fill))

    return PairTokens(
        logprobs(masks[0]).requires_grad_(),
        logprobs(masks[1]).requires_grad_(),
        masks[0],
        masks[1],
        logprobs(masks[0]),
        logprobs(masks[1]),
        logprobs(masks[0]),
        logprobs(masks[1]),
        column(0.5, 0.0, -0.5),
    )
