"""How far a rollout batch lies from the reference policy, in the units that controllers read."""

from __future__ import annotations

from typing import Any

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import KlEstimator
from posttrain.core.math.masking import masked, row_sums


def kl_of_batch(batch: RolloutBatch, estimator: KlEstimator[Any]) -> dict[str, float]:
    """`kl/ref_token` and `kl/ref_sequence` of the old policy's log-probs, nats.

    Per token: mean over rows of a row's own mean (an empty row counts as 0). Per sequence: mean
    over rows of a row's sum (Ziegler et al., arXiv:1909.08593, section 2.2).
    """
    mask = batch.response_mask
    kl = estimator.kl(
        masked(batch.column("old_logprobs"), mask), masked(batch.column("ref_logprobs"), mask)
    )
    sums = row_sums(kl.detach(), mask)
    lengths = mask.double().sum(dim=1).clamp(min=1)
    return {
        "kl/ref_token": float((sums / lengths).mean()),
        "kl/ref_sequence": float(sums.mean()),
    }
