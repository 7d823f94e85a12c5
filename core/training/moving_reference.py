"""A reference policy that follows the policy: by a moving average, in part, or as a whole.

Its anchors are the weights that are trained: all of them, or those of an adapter, which the
reference has one of its own of. They are kept in float32, because bfloat16 would lose small steps.
On ranks each has the pieces that it has of the policy.

Sources: EMA, arXiv:2602.04417; TR-DPO, arXiv:2404.09656 (soft and hard updates); BEMA,
arXiv:2508.00180.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Module

from posttrain.core.models.sharded import put_away
from posttrain.core.training.finite import NonFinite
from posttrain.core.training.optim import MasterOptimizer, read_kinds, write_kinds
from posttrain.core.training.pieces import with_pieces

_ANCHORS, _VERSION, _AVERAGE = "anchor", "version", "average"
_LAG, _EMA_POWER, _BIAS_POWER = 10, 0.5, 0.2  # of BEMA, as in its paper and in TRL


class MovingReference:
    """Moves `reference` to the weights of `optimizer`; in checkpoints a `StoredOptimizer`.

    After each `every`-th optimizer step it becomes (1 - rate) reference + rate policy; with `every`
    0 it moves when `move` is called. `version` counts its moves.
    """

    def __init__(
        self, reference: Module, optimizer: MasterOptimizer, *, rate: float = 1.0, every: int = 0
    ) -> None:
        self.reference, self.optimizer = reference, optimizer
        self.rate, self.every = rate, every
        self.step_count = self.version = 0
        self.precision = optimizer.precision
        own = dict(reference.named_parameters())
        self._params = {name: own[name] for name in optimizer.weights()}
        # Of float32 the reference's own weights.
        self._anchors = {
            name: param.detach() if _is_wide(param) else param.detach().float().clone()
            for name, param in self._params.items()
        }

    def after_step(self) -> None:
        """Count an optimizer step, and move if it is due."""
        self.step_count += 1
        if self.every and self.step_count % self.every == 0:
            self.follow()

    def follow(self) -> None:
        """Move as the rule says."""
        self.move(self.rate)

    @torch.no_grad()
    def move(self, rate: float) -> None:
        """(1 - rate) of the reference and `rate` of the policy; 1 is the policy exactly."""
        put_away(self.reference)  # type: ignore[arg-type]  # a module without shards is left alone
        for name, weight in self.optimizer.weights().items():
            anchor = self._anchors[name]
            target = weight.detach().to(anchor.dtype)
            if rate == 1:
                anchor.copy_(target)
            else:
                anchor.mul_(1 - rate).add_(target, alpha=rate)
        self._show()
        self.version += 1

    def _show(self) -> None:
        """Copy anchors that are not the reference's own weights into it."""
        for name, param in self._params.items():
            if not _is_wide(param):
                param.copy_(self._anchors[name])

    def write(self, folder: Path) -> None:
        """As in `StoredOptimizer`."""
        kinds = {kind: _numbered(tensors) for kind, tensors in self._kept().items()}
        write_kinds({**kinds, _VERSION: {"0": torch.tensor(self.version)}}, folder)

    def _kept(self) -> dict[str, dict[str, Tensor]]:
        """The tensors of a checkpoint by kind, by name."""
        return {_ANCHORS: self._anchors}

    @torch.no_grad()
    def read(self, folder: Path, step_count: int) -> None:
        """As in `StoredOptimizer`."""
        own = list(self._anchors.values())
        kinds = read_kinds(with_pieces(folder), lambda number: own[int(number)])
        put_away(self.reference)  # type: ignore[arg-type]
        for kind, tensors in self._kept().items():
            kept = list(tensors.values())
            for number, saved in kinds[kind].items():
                kept[int(number)].copy_(saved)
        self.step_count, self.version = step_count, int(kinds[_VERSION]["0"].item())
        self._show()

    def weights(self, step: int = 0) -> Mapping[str, Tensor]:
        """The anchors by name."""
        return self._anchors

    def take_non_finite(self) -> list[NonFinite]:
        """None of its own: what is not finite never got into the policy."""
        return []

    def close(self) -> None:
        """Forget the anchors; the reference stays as it is."""
        for tensors in self._kept().values():
            tensors.clear()
        self._params.clear()


class BiasCorrectedReference(MovingReference):
    """A reference without the lag of a moving average: average + a_t (policy - its start).

    After each `every`-th optimizer step t: average = (1 - b_t) average + b_t policy, b_t =
    (10 + t)^-0.5, a_t = (10 + t)^-0.2. The average begins as the policy does, which is what the
    stage reads, so that its start is not in checkpoints.
    """

    def __init__(self, reference: Module, optimizer: MasterOptimizer, *, every: int) -> None:
        super().__init__(reference, optimizer, every=every)
        self._average = {name: anchor.clone() for name, anchor in self._anchors.items()}
        self._start = {name: anchor.clone() for name, anchor in self._anchors.items()}

    @torch.no_grad()
    def follow(self) -> None:
        """As in `MovingReference`."""
        put_away(self.reference)  # type: ignore[arg-type]
        share, correction = (
            (_LAG + self.step_count) ** -power for power in (_EMA_POWER, _BIAS_POWER)
        )
        for name, weight in self.optimizer.weights().items():
            average, anchor = self._average[name], self._anchors[name]
            policy = weight.detach().to(anchor.dtype)
            average.mul_(1 - share).add_(policy, alpha=share)
            anchor.copy_(average + correction * (policy - self._start[name]))
        self._show()
        self.version += 1

    def _kept(self) -> dict[str, dict[str, Tensor]]:
        return {**super()._kept(), _AVERAGE: self._average}

    def close(self) -> None:
        """As in `MovingReference`."""
        super().close()
        self._start.clear()


def _numbered(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {str(number): tensor for number, tensor in enumerate(tensors.values())}


def _is_wide(param: Tensor) -> bool:
    return param.dtype in (torch.float32, torch.float64)
