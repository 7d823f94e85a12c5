"""Exact sums over the vocabulary at each token: KL of two policies, squared probabilities.

The sums of squares are read by the optimal token baseline and by WPO's weights.
Axes: B rows, T response tokens, N response tokens of all rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from posttrain.core.batch import RolloutBatch
from posttrain.core.models.paths import OutputHead
from posttrain.core.training.forward import States, policy_head, response_states, to_rows

CHUNK = 1024  # tokens whose float32 logits are held at a time


@torch.no_grad()
def response_sum_pi_squared(
    model: PreTrainedModel, batch: RolloutBatch, *, temperature: float
) -> Tensor:
    """sum_v pi(v)^2 [B, T] in (0, 1] at the sampling temperature; 0 where `response_mask` is 0."""
    hidden, ids, mask, _ = response_states(model, batch, include_last=False)
    head, chosen = policy_head(model), hidden[:, : ids.shape[1]][mask]
    parts = []
    for chunk in torch.split(chosen, CHUNK):
        logits = head.logits(chunk) / temperature
        parts.append(torch.softmax(logits, dim=-1).square().sum(dim=-1))
    values = torch.cat(parts) if parts else chosen.new_zeros(0)
    return to_rows(values, mask, batch.response_ids.shape).cpu()


KlOfLogits = Callable[[Tensor, Tensor], Tensor]
"""KL [n] in nats of a policy's logits [n, V] and another's [n, V]."""

DEFAULT_CHUNK = 256  # rows: several [chunk, V] tensors live at a time, not one


def kl_to_policy(logits: Tensor, old_logits: Tensor) -> Tensor:
    """KL(old || policy) [n] in nats of logits [n, V]: a trust region's distance."""
    old = torch.log_softmax(old_logits, dim=-1)
    gap = old - torch.log_softmax(logits, dim=-1)
    probs = old.exp()
    # A probability of exactly 0 contributes 0, also where its log is -inf.
    return torch.where(probs > 0, probs * gap, torch.zeros_like(gap)).sum(dim=-1)


def token_kl(
    hidden: Tensor,
    head: OutputHead,
    other_hidden: Tensor,
    other_head: OutputHead,
    kl_of_logits: KlOfLogits,
    *,
    temperature: float,
    chunk: int = DEFAULT_CHUNK,
) -> Tensor:
    """`kl_of_logits` [N] of two policies' hidden states [N, H] and heads at `temperature`.

    Gradients flow into `hidden` and `head`; the backward pass makes each chunk's logits again.
    """

    def of_chunk(logits: Tensor, rows: slice) -> Tensor:
        return kl_of_logits(logits, other_head.logits(other_hidden[rows]) / temperature)

    parts = over_logits(hidden, head, of_chunk, temperature=temperature, chunk=chunk)
    return torch.cat(parts) if parts else no_tokens(hidden, head)


def no_tokens(hidden: Tensor, head: OutputHead) -> Tensor:
    """Values [0] of no tokens, with the graph of `hidden` [0, H] and `head`."""
    zero = hidden.sum(dim=1).float()
    return zero if head.weight is None else zero + 0.0 * head.weight.sum().float()


FoundT = TypeVar("FoundT")


def over_logits(
    hidden: Tensor,
    head: OutputHead,
    of_chunk: Callable[[Tensor, slice], FoundT],
    *,
    temperature: float,
    chunk: int = DEFAULT_CHUNK,
) -> list[FoundT]:
    """What `of_chunk` makes of each chunk's logits [n, V] at `temperature`, and of its rows.

    Gradients flow into `hidden` [N, H] and `head`; the backward pass makes each chunk's logits
    again, so that only one chunk's live at a time.
    """
    weight = head.weight
    # Gradients of many low-precision chunks are summed at this float32 copy, not at the weight.
    shared = weight
    if weight is not None and weight.dtype == torch.bfloat16:
        shared = weight.float()
    parts: list[FoundT] = []
    for start in range(0, hidden.shape[0], chunk):
        rows = slice(start, start + chunk)

        def found(h: Tensor, w: Tensor | None, rows: slice = rows) -> FoundT:
            logits = head.logits(h, None if w is None else w.to(h.dtype)) / temperature
            return of_chunk(logits, rows)

        if torch.is_grad_enabled():
            parts.append(checkpoint(found, hidden[rows], shared, use_reentrant=False))
        else:
            parts.append(found(hidden[rows], shared))
    return parts


def response_exact_kl(
    model: PreTrainedModel,
    reference: PreTrainedModel,
    batch: RolloutBatch,
    temperature: float,
    kl_of_logits: KlOfLogits,
    *,
    states: States | None = None,
) -> Tensor:
    """`kl_of_logits` of `model` and a frozen `reference` at each response token of `batch`.

    The result [B, T] is 0 where `response_mask` is 0 and carries gradients for `model`. `states`
    are what `response_states` gave for `model`, when a forward pass was made already.
    """
    hidden, ids, mask, _ = states or response_states(model, batch, include_last=False)
    with torch.no_grad():
        other, _, _, _ = response_states(reference, batch, include_last=False)
    length = ids.shape[1]
    kl = token_kl(
        hidden[:, :length][mask],
        policy_head(model),
        other[:, :length].to(hidden.device)[mask],
        policy_head(reference).detached(hidden.device),
        kl_of_logits,
        temperature=temperature,
    )
    return to_rows(kl, mask, batch.response_ids.shape)
