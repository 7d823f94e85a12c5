"""An optimizer with float32 master weights, a schedule, and its tensors in files.

Pieces are those of torch.distributed.checkpoint in its safetensors form, which puts them together
again for any number of ranks; what one process wrote is one whole file, which it reads as well.

Low-precision parameters would lose small updates (5e-6 on a weight of 0.1 is below one bfloat16
step), so the optimizer owns a float32 copy, or rounds at random where memory is short. Each
micro-batch's gradient is added in float32 in both cases.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn import Module, Parameter

from posttrain.core.config.sections import OptimizerBase, OptimizerSection
from posttrain.core.contracts import Optimizer
from posttrain.core.errors import ConfigError, RunError
from posttrain.core.models.sharded import whole
from posttrain.core.training.adamw import AdamW
from posttrain.core.training.digests import Block
from posttrain.core.training.finite import NonFinite, all_finite, not_finite
from posttrain.core.training.pieces import with_pieces

Kinds = dict[str, dict[str, Tensor]]
"""Tensors by their kind ("master", "exp_avg"), then by the number of their parameter."""

_WHOLE = "whole.safetensors"


def write_kinds(kinds: Mapping[str, Mapping[str, Tensor]], folder: Path) -> None:
    """Write `kinds` below `folder`; on several ranks all of them must."""
    for kind, tensors in kinds.items():
        (folder / kind).mkdir(parents=True, exist_ok=True)
        if _several_ranks():
            writer = HuggingFaceStorageWriter(path=str(folder / kind), save_distributed=True)
            save(dict(tensors), storage_writer=writer)
        else:
            found = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            save_file(found, folder / kind / _WHOLE)


def read_kinds(folder: Path, like: Callable[[str], Tensor]) -> Kinds:
    """What `write_kinds` wrote, whatever number of ranks did.

    `like` gives the weight of a number: a tensor of its shape lies in pieces as the weight does.
    """
    return {path.name: _read(path, like) for path in sorted(folder.iterdir()) if path.is_dir()}


def _read(folder: Path, like: Callable[[str], Tensor]) -> dict[str, Tensor]:
    alone = not _several_ranks()
    if alone and (folder / _WHOLE).is_file():
        return load_file(folder / _WHOLE)
    reader = HuggingFaceStorageReader(str(folder))
    tensors = {}
    for name, kept in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(kept, TensorStorageMetadata)  # safetensors hold tensors alone
        size, dtype, weight = kept.size, kept.properties.dtype, like(name)
        pieces = size and size == weight.shape
        zeros = torch.zeros_like(weight, dtype=dtype) if pieces else torch.zeros(size, dtype=dtype)
        tensors[name] = zeros
    with warnings.catch_warnings():  # that this is one process
        warnings.simplefilter("ignore", UserWarning)
        load(tensors, storage_reader=reader, no_dist=alone)
    return tensors


def _several_ranks() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


_MASTER = "master"
_GROUP = "group."
_NUMBERS: dict[str, tuple[type, torch.dtype]] = {
    ".bool": (bool, torch.bool),
    ".int": (int, torch.int64),
    ".float": (float, torch.float64),
}
"""How a number that is not a tensor is stored: the end of its kind, and the type of the tensor."""


def _stored(kind: str, value: object, name: str) -> tuple[str, Tensor]:
    """A value of an optimizer's state as a tensor; raises `RunError` where it is none."""
    if isinstance(value, Tensor):
        return kind, value
    for end, (python, dtype) in _NUMBERS.items():
        if isinstance(value, python):
            return kind + end, torch.tensor(value, dtype=dtype)
    raise RunError(
        f"optimizer '{name}' keeps a {type(value).__name__} as '{kind}' in its state, which no "
        "checkpoint holds: its state must be tensors and numbers"
    )


def _restored(kind: str, tensor: Tensor) -> tuple[str, Any]:  # Any: a tensor or a number
    """The inverse of `_stored`."""
    for end, (python, _) in _NUMBERS.items():
        if kind.endswith(end):
            return kind.removesuffix(end), python(tensor.item())
    return kind, tensor


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one optimizer step did: the gradient's norm before clipping, and the rate used.

    `skipped` is one without any gradient. `non_finite` says that the loss or the gradient was not
    finite, so that the step was not taken, or that weights are not finite after it.
    """

    grad_norm: float
    grad_clipped: bool
    learning_rate: float
    skipped: bool
    non_finite: bool = False

    def metrics(self) -> dict[str, float]:
        """Of a step that is one optimizer step."""
        found = {"grad/norm": self.grad_norm, "lr": self.learning_rate}
        return found | ({"grad/non_finite": 1.0} if self.non_finite else {})


def schedule_factor(section: OptimizerBase, step: int, total_steps: int) -> float:
    """Factor on the learning rate for the 0-based `step`: linear warm-up, then the schedule."""
    if step < section.warmup_steps:
        return (step + 1) / section.warmup_steps
    if section.schedule == "constant":
        return 1.0
    span = max(1, total_steps - section.warmup_steps)
    done = min(1.0, (step - section.warmup_steps) / span)
    return 1.0 - done if section.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))


def precision_of(section: OptimizerBase) -> str:
    """How weights and moments are kept; the name of an optimizer that has one way only."""
    if isinstance(section, OptimizerSection):
        return f"weights: {section.rounding}, moments: {section.moments}"
    return f"optimizer: {section.name}"


class StoredOptimizer(Protocol):
    """What a checkpoint asks of an optimizer, in this process or on ranks."""

    @property
    def step_count(self) -> int:
        """Optimizer steps taken."""

    @property
    def precision(self) -> str:
        """How weights and moments are kept: a checkpoint of another precision does not fit."""

    def write(self, folder: Path) -> None:
        """Write masters and moments below `folder`."""

    def read(self, folder: Path, step_count: int) -> None:
        """Continue from what `write` wrote, also in the model's own weights."""

    def weights(self, step: int) -> Mapping[str, Tensor | Block]:
        """The trained weights by name, as exactly as they are kept.

        Of weights that lie in pieces on ranks the block that the digest of `step` reads.
        """

    def take_non_finite(self) -> list[NonFinite]:
        """What was not finite since the last call."""

    def close(self) -> None:
        """Free what it holds."""


class MasterOptimizer:
    """An optimizer of a module's trainable parameters; the module docstring has the precision."""

    def __init__(
        self,
        module: Module,
        section: OptimizerBase,
        total_steps: int,
        *,
        seed: int = 0,
        algorithm: Optimizer[Any] | None = None,
    ) -> None:
        """`seed` is of the optimizer's random numbers, such as those of stochastic rounding.

        `algorithm` is what `section` names; it may be left out of an AdamW section.
        """
        if algorithm is None:
            assert isinstance(section, OptimizerSection), "other optimizers are plugins"
            algorithm = AdamW.of(section)
        self.section, self.total_steps, self.step_count = section, total_steps, 0
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._names, self._params = list(trained), list(trained.values())
        self._masters: list[Tensor] = []
        self._non_finite: list[NonFinite] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        rounded = self._rounded = not algorithm.keeps_masters()
        if rounded:
            _require_bfloat16(self._params)
        for param in self._params:
            if rounded:
                param.grad_dtype = torch.float32  # autograd casts each gradient, then adds
            own = rounded or param.dtype == torch.float32
            master = param if own else param.detach().float().clone()
            self._masters.append(master)
            if master is not param:
                hook = param.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    _add_to(master)
                )
                self._hooks.append(hook)
        self.optimizer = algorithm.build(self._masters, section.learning_rate, seed)

    def step(
        self, rate_factor: float = 1.0, *, loss: float = 0.0, rows: Iterable[int] = ()
    ) -> StepReport:
        """Clip, step, copy the masters into the model, clear gradients.

        A step without any gradient is skipped; the schedule advances all the same. `rate_factor`
        multiplies the scheduled learning rate. If the `loss` or the gradient's norm is not finite,
        weights and moments stay as they are, and `rows` are noted as where it came from.
        """
        rate = (
            rate_factor
            * self.section.learning_rate
            * schedule_factor(self.section, self.step_count, self.total_steps)
        )
        self.step_count += 1
        with_grad = [m for m in self._masters if m.grad is not None]
        grads = [m.grad for m in with_grad if m.grad is not None]
        total = torch.nn.utils.get_total_norm(grads)
        norm = float(whole(total))
        if wrong := not_finite(loss, norm):
            self.zero_grad()
            self.note_non_finite(wrong, rows)
            return StepReport(norm, False, rate, skipped=False, non_finite=True)
        if not with_grad:
            return StepReport(0.0, False, rate, skipped=True)
        limit = self.section.max_grad_norm
        if limit is not None and norm > limit:
            torch.nn.utils.clip_grads_with_norm_(with_grad, limit, total)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.zero_grad()
        self._copy_masters()
        fine = all_finite(self._masters)
        if not fine:
            self.note_non_finite("weights are not finite after it", rows, in_weights=True)
        clipped = limit is not None and norm > limit
        return StepReport(norm, clipped, rate, skipped=False, non_finite=not fine)

    def note_non_finite(self, what: str, rows: Iterable[int], *, in_weights: bool = False) -> None:
        """Note what is not finite in the present step, for `take_non_finite`."""
        self._non_finite.append(NonFinite(what, tuple(sorted(rows)), in_weights))

    def take_non_finite(self) -> list[NonFinite]:
        """As in `StoredOptimizer`."""
        found, self._non_finite = self._non_finite, []
        return found

    def fill_gradients(self) -> None:
        """Gradients of 0 where there are none: such an update still lets moments decay."""
        for master in self._masters:
            if master.grad is None:
                master.grad = torch.zeros_like(master, dtype=torch.float32)

    def zero_grad(self) -> None:
        """Forget gradients, of an update that was given up included."""
        for tensor in (*self._masters, *self._params):
            tensor.grad = None

    def weights(self, step: int = 0) -> dict[str, Tensor]:
        """As in `StoredOptimizer`: the masters, not copied; on a rank its pieces of them."""
        return dict(zip(self._names, self._masters, strict=True))

    def close(self) -> None:
        """Detach from the module and free masters and moments: the module is its own again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.zero_grad()
        if self._rounded:
            for param in self._params:
                param.grad_dtype = param.dtype
        self._masters.clear()
        self.optimizer.state.clear()
        self.optimizer.param_groups.clear()

    @property
    def precision(self) -> str:
        return precision_of(self.section)

    def state_dict(self) -> dict[str, Any]:  # Any: torch's optimizer state is untyped
        """Masters, moments and step count: what a checkpoint must keep in addition to the model."""
        return {
            "step_count": self.step_count,
            "masters": [m.detach() for m in self._masters],
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step_count = int(state["step_count"])
        with torch.no_grad():
            for master, saved in zip(self._masters, state["masters"], strict=True):
                master.copy_(saved)
        self.optimizer.load_state_dict(state["optimizer"])
        self._copy_masters()

    def write(self, folder: Path) -> None:
        """As in `StoredOptimizer`; moments exist once a step was taken."""
        state = self.state_dict()
        kinds: Kinds = {_MASTER: {str(i): tensor for i, tensor in enumerate(state["masters"])}}
        for i, values in state["optimizer"]["state"].items():
            for kind, value in values.items():
                if value is not None:
                    kind, tensor = _stored(kind, value, self.section.name)
                    kinds.setdefault(kind, {})[str(i)] = tensor
        for i, group in enumerate(state["optimizer"]["param_groups"]):
            for key, value in group.items():
                if key != "lr" and isinstance(value, int | float):
                    kind, tensor = _stored(_GROUP + key, value, self.section.name)
                    kinds.setdefault(kind, {})[str(i)] = tensor
        write_kinds(kinds, folder)

    def read(self, folder: Path, step_count: int) -> None:
        kinds = read_kinds(with_pieces(folder), lambda number: self._masters[int(number)])
        masters = kinds.pop(_MASTER)
        state: dict[int, dict[str, Any]] = {}
        groups = self.optimizer.state_dict()["param_groups"]
        for stored, tensors in kinds.items():
            for number, tensor in tensors.items():
                kind, value = _restored(stored, tensor)
                if kind.startswith(_GROUP):
                    groups[int(number)][kind.removeprefix(_GROUP)] = value
                else:
                    state.setdefault(int(number), {})[kind] = value
        self.load_state_dict(
            {
                "step_count": step_count,
                "masters": [masters[str(i)] for i in range(len(masters))],
                "optimizer": {"state": state, "param_groups": groups},
            }
        )

    @torch.no_grad()
    def _copy_masters(self) -> None:
        for param, master in zip(self._params, self._masters, strict=True):
            if master is not param:
                param.copy_(master)


def _require_bfloat16(params: list[Parameter]) -> None:
    """Rounding at random is of bfloat16 weights; of float32 ones it would do nothing."""
    other = {p.dtype for p in params} - {torch.bfloat16, torch.float32}
    if other or all(p.dtype == torch.float32 for p in params):
        found = ", ".join(sorted(str(p).removeprefix("torch.") for p in {p.dtype for p in params}))
        raise ConfigError(
            f"optimizer.rounding is 'stochastic', but the trained weights are {found}: set "
            "model.dtype: bfloat16, or optimizer.rounding: masters"
        )


def _add_to(master: Tensor) -> Any:  # Any: torch wants an untyped hook
    """A hook that moves a parameter's fresh gradient into its float32 master."""

    def add(param: Tensor) -> None:
        if param.grad is None:
            return
        if master.grad is None:
            master.grad = param.grad.float()
        else:
            master.grad += param.grad
        param.grad = None

    return add
