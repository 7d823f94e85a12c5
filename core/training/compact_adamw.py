"""AdamW in less memory: moments of 8 bits, bfloat16 weights without float32 copies, or both.

Parameters are worked on in parts, so that what is made in float32 on the way stays small. Noise is
derived from the seed, the parameter's place and its step: a resumed run draws the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from posttrain.core.config.sections import OptimizerSection
from posttrain.core.math.rounding import round_stochastically
from posttrain.core.runtime.seeding import derive_seed
from posttrain.core.training.eight_bit import BLOCK, LEAST, EightBit

# Weights that are worked on at a time: 64 MB in float32. Whole blocks of 8-bit moments.
PART = 65536 * BLOCK
_SCALES = ("exp_avg_scale", "exp_avg_sq_scale")


class CompactAdamW(torch.optim.Optimizer):
    """AdamW over float32 tensors, and over bfloat16 ones, which are rounded at random."""

    def __init__(self, params: Sequence[Tensor], section: OptimizerSection, seed: int) -> None:
        super().__init__(params, {"lr": section.learning_rate})
        self._section, self._seed = section, seed
        self._eight_bit = EightBit(section) if section.moments == "8bit" else None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # Any: torch's signature
        for group in self.param_groups:
            for place, param in enumerate(group["params"]):
                if param.grad is not None:
                    self._move(place, param, group["lr"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict`; torch's own would cast moments to the parameter's type."""
        params = [param for group in self.param_groups for param in group["params"]]
        for place, saved in state_dict["state"].items():
            param = params[place]
            self.state[param] = {
                name: tensor.clone() if name == "step" else tensor.to(param.device, copy=True)
                for name, tensor in saved.items()
            }

    def _move(self, place: int, param: Tensor, rate: float) -> None:
        state = self.state[param]
        if not state:
            state.update(self._fresh(param))
        step = int(state["step"]) + 1
        chance = torch.Generator(param.device)  # used by bfloat16 weights only
        chance.manual_seed(derive_seed(self._seed, "rounding", place, step))
        flat = {name: value.view(-1) for name, value in state.items() if name != "step"}
        weights, grad = param.detach().view(-1), param.grad.reshape(-1)  # type: ignore[union-attr]
        for start in range(0, param.numel(), PART):
            here = slice(start, start + PART)
            scales = slice(start // BLOCK, (start + PART) // BLOCK)
            part = {n: flat[n][scales if n in _SCALES else here] for n in flat}
            own = weights[here]
            wide = own.float()  # itself where the weights are float32
            self._update(wide, grad[here], part, rate, step)
            if wide.dtype != own.dtype:
                own.copy_(round_stochastically(wide, chance))
        state["step"].fill_(step)

    def _fresh(self, param: Tensor) -> dict[str, Tensor]:
        """A parameter's state before its first step. The count stays on the CPU."""
        step = torch.zeros(())
        if self._eight_bit is not None and param.numel() >= LEAST:
            return {"step": step, **EightBit.fresh(param)}
        zeros = torch.zeros_like(param, dtype=torch.float32)
        return {"step": step, "exp_avg": zeros, "exp_avg_sq": torch.zeros_like(zeros)}

    def _update(
        self, weights: Tensor, grad: Tensor, moments: dict[str, Tensor], rate: float, step: int
    ) -> None:
        if "exp_avg_scale" in moments:
            assert self._eight_bit is not None
            self._eight_bit.update(weights, grad, moments, rate, step)
            return
        adamw(
            [weights],
            [grad],
            [moments["exp_avg"]],
            [moments["exp_avg_sq"]],
            [],
            [torch.tensor(step - 1.0, device=weights.device)],  # which it counts up itself
            fused=True,
            amsgrad=False,
            beta1=self._section.betas[0],
            beta2=self._section.betas[1],
            lr=rate,
            weight_decay=self._section.weight_decay,
            eps=self._section.eps,
            maximize=False,
        )
