"""Stops a variant at an evaluation during training, once it is surely behind the base.

Each evaluation of a variant is one look: its answers to held-out problems against the base's at the
same step, over all seeds that both have there (`core/math/sequential.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.core.math.sequential import CONFIDENCE, behind_at_look
from posttrain.pipelines.sweep.branches import Branch
from posttrain.pipelines.sweep.record import BranchRecord, SweepRecord


@dataclass
class StopBehind:
    """The judge of `--stop-early`. `base` is never stopped."""

    base: str
    branches: Sequence[Branch]

    def seen(self, record: SweepRecord, branch: Branch, stage: str, step: int) -> str:
        """Why the variant is stopped, as its row has it; empty if it goes on."""
        if branch.variant == self.base:
            return ""
        differences = self._differences(record, branch.variant, step)
        if not differences:
            return ""
        if not behind_at_look(differences, self._looks(record, branch.variant)):
            return ""
        return f"stopped at step {step}, sure to {CONFIDENCE:.0%}"

    def _looks(self, record: SweepRecord, variant: str) -> int:
        """How often the variant was looked at, this time and before an interruption too."""
        seeds = dict.fromkeys(branch.seed for branch in self.branches)
        found = (self._at(record, variant, seed) for seed in seeds)
        return sum(len(one.right) for one in found if one is not None)

    def _differences(self, record: SweepRecord, variant: str, step: int) -> list[float]:
        """The variant's answers minus the base's, problem by problem, of each seed."""
        found: list[float] = []
        for seed in dict.fromkeys(branch.seed for branch in self.branches):
            own, base = self._at(record, variant, seed), self._at(record, self.base, seed)
            if own is None or base is None or own.problems != base.problems:
                continue
            if step in own.right and step in base.right:
                pairs = zip(own.right[step], base.right[step], strict=True)
                found += [float(int(mine) - int(theirs)) for mine, theirs in pairs]
        return found

    def _at(self, record: SweepRecord, variant: str, seed: int) -> BranchRecord | None:
        keys = (b.key for b in self.branches if (b.variant, b.seed) == (variant, seed))
        return next((record.branches[key] for key in keys if key in record.branches), None)
