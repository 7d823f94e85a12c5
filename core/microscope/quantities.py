"""What is known of each token of a step, beside its weight. Axes: B responses, T tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.core.evidence.step import StepEvidence
from posttrain.core.math.kl import k3
from posttrain.core.math.masking import masked
from posttrain.core.microscope.weights import read_rows

CLAMP = 20.0  # bound of log ratios before exp, nats: as in the losses


@dataclass(frozen=True, slots=True)
class Quantities:
    """Columns [B, T] of a step; NaN where something is not known, None where it never is.

    `logprobs`, `entropy` (nats) are the policy's as the last optimizer step read them; `ratio` is
    exp(logprobs - old log-probs); `mismatch` (nats) is the trainer's old log-prob less the engine's
    of the same token; `kl_k1` and `kl_k3` (nats) are estimates of the KL to the reference.
    """

    advantage: Tensor
    logprobs: Tensor
    ratio: Tensor
    entropy: Tensor
    mismatch: Tensor
    kl_k1: Tensor | None
    kl_k3: Tensor | None


def quantities(evidence: StepEvidence) -> Quantities:
    """What the evidence says of each token."""
    batch = evidence.batch
    takes_loss = batch.mask.bool()
    known = takes_loss & read_rows(evidence)[:, None]
    seen, old = evidence.seen_logprobs, batch.column("old_logprobs").to(evidence.seen_logprobs)
    ratio = masked(seen - old, known).clamp(-CLAMP, CLAMP).exp()
    # A row that nobody read has zeros for the old policy's log-probs where only its update would
    # have computed them.
    computed = known | (takes_loss & (old != 0).any(dim=1, keepdim=True))
    k1 = None if batch.ref_logprobs is None else seen - batch.ref_logprobs.to(seen)
    return Quantities(
        advantage=_where(takes_loss, batch.column("advantages")),
        logprobs=_where(known, seen),
        ratio=_where(known, ratio),
        entropy=_where(known, evidence.seen_entropy),
        mismatch=_where(computed, old - batch.rollout_logprobs.to(old)),
        kl_k1=None if k1 is None else _where(known, k1),
        kl_k3=None if k1 is None else _where(known, k3(masked(k1, known), CLAMP, None)),
    )


def sequence_ratios(evidence: StepEvidence) -> Tensor:
    """exp of the mean log ratio of each response's tokens [B]; NaN where it is not known."""
    known = evidence.batch.mask.bool() & read_rows(evidence)[:, None]
    old = evidence.batch.column("old_logprobs").to(evidence.seen_logprobs)
    gaps = masked(evidence.seen_logprobs - old, known).double()
    mean = gaps.sum(dim=1) / known.sum(dim=1)  # 0 / 0 is the NaN that is promised
    return mean.clamp(-CLAMP, CLAMP).exp()


def _where(known: Tensor, values: Tensor) -> Tensor:
    return torch.where(known, values, torch.full_like(values, float("nan")))
