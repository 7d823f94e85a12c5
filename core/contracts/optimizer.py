"""The contract of an optimizer: the algorithm that turns gradients into new weights.

The schedule, clipping, float32 copies of low-precision weights, steps on numbers that are not
finite, and checkpoints are the same for all of them (`core/training/optim.py`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from posttrain.core.contracts.base import ConfigT, Plugin

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Optimizer"]


class Optimizer(Plugin[ConfigT]):
    """Builds a `torch.optim.Optimizer`, and says what its state needs.

    A checkpoint keeps the state of each weight (tensors, numbers) and the numbers of the parameter
    group, and gives them to the optimizer's own `load_state_dict`. That of torch casts tensors to
    the type of the weights, float32: an optimizer with state of another type overrides it. Random
    numbers must follow from `seed` and the number of the step, or a resumed run differs.
    """

    kind = "optimizer"

    on_ranks: ClassVar[bool] = False
    """Whether it works on weights that lie in pieces on several ranks: each weight is moved by its
    own gradient and state alone (no norms over a whole tensor)."""

    @abstractmethod
    def build(
        self, weights: Sequence[Tensor], learning_rate: float, seed: int
    ) -> torch.optim.Optimizer:
        """The optimizer of `weights`, which are float32 if `keeps_masters()`.

        `lr` of its parameter groups is set before each step. A weight without gradient stays.
        """

    def keeps_masters(self) -> bool:
        """Whether bfloat16 weights get a float32 copy, which is what the optimizer moves."""
        return True

    def state_bytes(self) -> float:
        """Bytes of state that it holds for each weight; two float32 moments unless overridden."""
        return 8.0

    def missing(self) -> str:
        """What to install before it can be used; empty if nothing is missing."""
        return ""
