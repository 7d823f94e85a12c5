"""AdamW with float32 master weights, a schedule, and gradients summed in float32.

Low-precision parameters would lose small updates (5e-6 on a weight of 0.1 is below one bfloat16
step), so the optimizer owns a float32 copy, and each micro-batch's gradient is added in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from posttrain.core.config.sections import OptimizerSection


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one optimizer step did: the gradient's norm before clipping, and the rate used."""

    grad_norm: float
    grad_clipped: bool
    learning_rate: float
    skipped: bool


def schedule_factor(section: OptimizerSection, step: int, total_steps: int) -> float:
    """Factor on the learning rate for the 0-based `step`: linear warm-up, then the schedule."""
    if step < section.warmup_steps:
        return (step + 1) / section.warmup_steps
    if section.schedule == "constant":
        return 1.0
    span = max(1, total_steps - section.warmup_steps)
    done = min(1.0, (step - section.warmup_steps) / span)
    return 1.0 - done if section.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))


class MasterOptimizer:
    """AdamW over a module's trainable parameters; see the module docstring for the precision."""

    def __init__(self, module: Module, section: OptimizerSection, total_steps: int) -> None:
        self.section, self.total_steps, self.step_count = section, total_steps, 0
        self._params: list[Parameter] = [p for p in module.parameters() if p.requires_grad]
        self._masters: list[Tensor] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        for param in self._params:
            master = param.detach().float().clone() if param.dtype != torch.float32 else param
            self._masters.append(master)
            if master is not param:
                hook = param.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    _add_to(master)
                )
                self._hooks.append(hook)
        self.optimizer = torch.optim.AdamW(
            self._masters,
            lr=section.learning_rate,
            betas=section.betas,
            eps=section.eps,
            weight_decay=section.weight_decay,
            fused=True,
        )

    def step(self, rate_factor: float = 1.0) -> StepReport:
        """Clip, step, copy the masters into the model, clear gradients.

        A step without any gradient is skipped; the schedule advances all the same. `rate_factor`
        multiplies the scheduled learning rate.
        """
        rate = (
            rate_factor
            * self.section.learning_rate
            * schedule_factor(self.section, self.step_count, self.total_steps)
        )
        self.step_count += 1
        with_grad = [m for m in self._masters if m.grad is not None]
        if not with_grad:
            return StepReport(0.0, False, rate, skipped=True)
        limit = self.section.max_grad_norm
        norm = float(torch.nn.utils.clip_grad_norm_(with_grad, limit or float("inf")))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.zero_grad()
        self._copy_masters()
        return StepReport(norm, limit is not None and norm > limit, rate, skipped=False)

    def fill_gradients(self) -> None:
        """Gradients of 0 where there are none: an update whose rows all teach nothing is still one.

        Moments decay and weights move by them, as after a backward pass that gave zeros.
        """
        for master in self._masters:
            if master.grad is None:
                master.grad = torch.zeros_like(master)

    def zero_grad(self) -> None:
        """Forget gradients, of an update that was given up included."""
        for tensor in (*self._masters, *self._params):
            tensor.grad = None

    def close(self) -> None:
        """Detach from the module and free masters and moments: the module is its own again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.zero_grad()
        self._masters.clear()
        self.optimizer.state.clear()
        self.optimizer.param_groups.clear()

    def state_dict(self) -> dict[str, Any]:  # Any: torch's optimizer state is untyped
        """Masters, moments and step count: what a checkpoint must keep beside the model."""
        return {
            "step_count": self.step_count,
            "masters": [m.detach() for m in self._masters],
            "adamw": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`, also in the model's own weights."""
        self.step_count = int(state["step_count"])
        with torch.no_grad():
            for master, saved in zip(self._masters, state["masters"], strict=True):
                master.copy_(saved)
        self.optimizer.load_state_dict(state["adamw"])
        self._copy_masters()

    @torch.no_grad()
    def _copy_masters(self) -> None:
        for param, master in zip(self._params, self._masters, strict=True):
            if master is not param:
                param.copy_(master)


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
