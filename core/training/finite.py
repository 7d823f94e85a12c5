"""What happens when a loss, a gradient or a weight is not a finite number.

An optimizer takes no step on a loss or gradient that is not finite, and looks at the weights after
each step that it took. It notes what it found, and the process of the run decides for all ranks at
once: the stage ends, or the step counts as skipped, up to a limit. The count comes from the history
of metrics, so an interrupted run goes on with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.core.config.sections import OptimizerBase, OptimizerSection
from posttrain.core.errors import RunError
from posttrain.core.models.sharded import whole
from posttrain.core.training.metrics import MetricSums

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class NonFinite:
    """What was not finite in an optimizer step.

    `rows` are indices in the batch of the stage's step: those whose own share of the loss is not
    finite, or all rows of the mini-batch where no single one is to blame. `in_weights` says that
    the step itself, taken on finite numbers, made weights that are not finite.
    """

    what: str
    rows: tuple[int, ...]
    in_weights: bool = False


def not_finite(loss: float, grad_norm: float) -> str:
    """Which of them is not finite, in words; empty when both are."""
    values = {"the loss": loss, "the norm of the gradient": grad_norm}
    return " and ".join(f"{name} is {v}" for name, v in values.items() if not math.isfinite(v))


@torch.no_grad()
def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether every value is finite; of sharded tensors the same on all ranks.

    The 2-norm takes a twentieth of the time of the largest value, but may overflow.
    """
    return any(
        math.isfinite(float(whole(torch.nn.utils.get_total_norm(list(tensors), norm_type=kind))))
        for kind in (2.0, math.inf)
    )


def note_suspects(
    sums: MetricSums, share: Tensor, rows: Sequence[int], *values: Tensor | None
) -> None:
    """Note in `sums` which of `rows` [n] make a micro-batch's `share` of the loss not finite.

    These are the ones with a value [n] or [n, T] that is not finite; all of them if none has.
    """
    if math.isfinite(float(share.detach())):
        return
    wrong = torch.zeros(len(rows), dtype=torch.bool)
    for value in values:
        if value is not None:
            wrong |= ~value.detach().cpu().isfinite().reshape(len(rows), -1).all(dim=1)
    found = [row for row, is_wrong in zip(rows, wrong.tolist(), strict=True) if is_wrong]
    sums.suspects.update(found or rows)


@dataclass(frozen=True, slots=True)
class FiniteGuard:
    """Decides whether a stage goes on after numbers that were not finite.

    `section` is that of the optimizer, at `place` in the stage; `metric` counts its steps of that
    kind in the history. `warn` receives what is said of a step that is skipped.
    """

    stage: str
    section: OptimizerBase
    warn: Callable[[str], None]
    place: str = "optimizer"
    metric: str = "grad/non_finite"

    def judge(
        self,
        step: int,
        found: Sequence[NonFinite],
        before: Sequence[Mapping[str, float]],
        keys: Sequence[str],
    ) -> RunError | None:
        """The error that ends the stage after `step`, if anything does.

        `before` are the metrics of earlier steps, `keys` name the rows of the step's batch.
        """
        if not found:
            return None
        limit = self.section.max_skipped if self.section.non_finite == "skip" else 0
        count = len(found) + int(sum(row.get(self.metric, 0.0) for row in before))
        fatal = next((one for one in found if one.in_weights), None)
        first = fatal or found[0]
        what = f"{self.stage}: step {step}: {first.what} ({_named(first.rows, keys)})"
        if fatal is not None:
            return RunError(f"{what}; nothing was stored. {self._for_weights()}")
        if count <= limit:
            self.warn(
                f"{what}: skipped, weights and moments are as before ({count} of at most {limit} "
                f"steps, {self.place}.max_skipped)"
            )
            return None
        if limit:
            what += f", which makes {count} such steps, above {self.place}.max_skipped {limit}"
        return RunError(f"{what}; the step was not taken and nothing was stored. {self._advice()}")

    def _advice(self) -> str:
        skip = (
            f", or leave such steps out with {self.place}.non_finite: skip, which goes on from the "
            "last checkpoint"
        )
        return (
            f"Try a lower {self.place}.learning_rate (it is {self.section.learning_rate:g}) or a "
            f"warm-up ({self.place}.warmup_steps), {self.place}.max_grad_norm if it is null, "
            "model.dtype: float32; look at the rows named here"
            + (skip if self.section.non_finite == "fail" else "")
        )

    def _for_weights(self) -> str:
        advice = (
            f"The loss and the gradient were finite: try a lower {self.place}.learning_rate (it is "
            f"{self.section.learning_rate:g})"
        )
        if isinstance(self.section, OptimizerSection):
            advice += f" or a larger {self.place}.eps (it is {self.section.eps:g})"
        return advice


def _named(rows: Sequence[int], keys: Sequence[str]) -> str:
    """Rows by number and key, a few of them."""
    known = [f"{row} '{keys[row]}'" if row < len(keys) else f"{row}" for row in rows]
    more = f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
    which = "all" if len(rows) == len(keys) else f"{len(rows)}"
    size = f" of the {len(keys)}" if keys else ""
    return f"{which}{size} rows of its batch: {', '.join(known[:_SHOWN])}{more}"
