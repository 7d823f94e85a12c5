"""Trainer and engine compared under one law, also where top-k or top-p cut what was sampled from.

The engine's log-probs are renormalised over the tokens that a cut kept, the trainer's are not. Both
are put on one law by the mass that the trainer's own cut keeps, so that their difference is of the
two programs alone. Axes: B rows, T response tokens.
"""

from __future__ import annotations

from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.math.mismatch import mismatch_metrics


def on_uncut_law(batch: RolloutBatch, log_kept: Tensor | None) -> RolloutBatch:
    """`batch` with the engine's log-probs [B, T] on the uncut law; as it is when nothing was cut.

    lp_roll + log_kept is what the engine would have said had it not renormalised, so everything
    that reads `rollout_logprobs` beside `old_logprobs` compares like with like.
    """
    if log_kept is None or batch.log_kept is not None:
        return batch
    kept = log_kept.to(batch.rollout_logprobs)
    return batch.with_columns(rollout_logprobs=batch.rollout_logprobs + kept, log_kept=kept)


def mismatch_of(batch: RolloutBatch, trainer: Tensor, mask: Tensor) -> dict[str, float]:
    """`mismatch/*` and `ess/*` of the trainer's log-probs [B, T], under the law sampled from."""
    engine = batch.rollout_logprobs
    if batch.log_kept is not None:
        trainer, engine = trainer - batch.log_kept, engine - batch.log_kept
    return mismatch_metrics(trainer, engine, mask)
