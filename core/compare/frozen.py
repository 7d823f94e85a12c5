"""A step of a run, frozen: what was sampled, how it was cut up, and what its update read.

Axes: B rows, T response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.errors import RunError
from posttrain.core.evidence.step import StepEvidence
from posttrain.core.training.splitting import mini_rows
from posttrain.core.training.updates import UpdateSettings


@dataclass(frozen=True, slots=True)
class FrozenMini:
    """A mini-batch: its number on the batch, all its `rows` [n], and those `taken` [n] (bool).

    Counts are of all rows. A row is taken from the mini-batch that read it last, so that each row
    of the batch is taken once.
    """

    number: int
    rows: Tensor
    taken: Tensor


@dataclass(frozen=True, slots=True)
class FrozenStep:
    """`logprobs` [B, T] are those the update computed its loss from, `read` [B] where it did.

    Rows that it did not read (their advantages were 0) have the old policy's log-probs. `entropy`
    [B, T] is None where it is not known of every row.
    """

    step: int
    batch: RolloutBatch
    logprobs: Tensor
    entropy: Tensor | None
    read: Tensor
    minis: tuple[FrozenMini, ...]
    settings: UpdateSettings

    @property
    def tokens(self) -> Tensor:
        """The tokens [B, T] that may have loss, as a mask."""
        return self.batch.mask.bool()


def freeze(evidence: StepEvidence, settings: UpdateSettings) -> FrozenStep:
    """Cut the evidence up as the run did; `settings` are of its config.

    Raises `RunError` where `seen_by` says otherwise: then evidence and config are of two runs.
    """
    batch, read = evidence.batch, evidence.seen_by >= 0
    entropy = evidence.seen_entropy
    if batch.entropy is not None:
        entropy = torch.where(read[:, None], entropy, batch.entropy)
    known = bool((read | ~batch.mask.bool().any(dim=1)).all()) or batch.entropy is not None
    return FrozenStep(
        step=evidence.step,
        batch=batch,
        logprobs=torch.where(read[:, None], evidence.seen_logprobs, batch.column("old_logprobs")),
        entropy=entropy.nan_to_num(0.0) if known else None,
        read=read,
        minis=_minis(evidence, settings),
        settings=settings,
    )


def _minis(evidence: StepEvidence, settings: UpdateSettings) -> tuple[FrozenMini, ...]:
    """The mini-batches that some row is taken from, by the numbers in `seen_by`."""
    batch, seen_by = evidence.batch, evidence.seen_by
    parts = list(
        mini_rows(
            batch,
            settings.epochs,
            settings.num_mini_batches,
            settings.seed,
            "mini_batches",
            evidence.step,
        )
    )
    owner = torch.full((len(batch),), -1)
    for number, rows in enumerate(parts):
        owner[rows] = number  # the last that holds it
    owner = torch.where(seen_by >= 0, seen_by, owner)
    found = []
    for number, rows in enumerate(parts):
        mine = owner == number
        if bool(mine.sum() != mine[rows].sum()):
            _disagrees(evidence)
        if mine.any():
            found.append(FrozenMini(number, rows, mine[rows]))
    if sum(int(mini.taken.sum()) for mini in found) != len(batch):
        _disagrees(evidence)
    return tuple(found)


def _disagrees(evidence: StepEvidence) -> None:
    raise RunError(
        f"the evidence of step {evidence.step} is not of this config: its column seen_by names "
        f"mini-batches that seed, epochs and num_mini_batches do not give; the run's record or its "
        "evidence was changed, so compute the stage again with --no-cache"
    )
