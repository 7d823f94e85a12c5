"""AdamW in less memory: moments of 8 bits, bfloat16 weights with stochastic rounding.

arXiv:2010.06192. An update smaller than half a bfloat16 step is lost by rounding to nearest, every
time; rounded like this, it moves the weight as often as it should.

arXiv:2110.02861. The library has a fused kernel for CUDA and needs no compiler; on a CPU it
is slow. The package is optional, so it is imported when a run asks for it.

Parameters are worked on in parts, so that what is made in float32 on the way stays small. Noise is
derived from the seed, the parameter's place and its step: a resumed run draws the same.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from posttrain.core.config.sections import OptimizerSection
from posttrain.core.errors import ResourceError
from posttrain.core.runtime.seeding import derive_seed

# bfloat16 is the upper half of a float32.
_LOW_BITS = 16


def round_stochastically(values: Tensor, chance: torch.Generator) -> Tensor:
    """float32 `values` as bfloat16, each one of its two neighbours, the nearer one more often.

    `chance` is a generator on the device of `values`. A value that bfloat16 has stays as it is,
    and so do infinities and NaN.
    """
    noise = torch.randint(
        1 << _LOW_BITS, values.shape, generator=chance, dtype=torch.int32, device=values.device
    )
    # Adding to the bits moves away from 0; what is carried into the upper half is the rounding.
    bits = values.view(torch.int32).add(noise).bitwise_and_(-1 << _LOW_BITS)
    return torch.where(values.isfinite(), bits.view(torch.float32), values).to(torch.bfloat16)


BLOCK = 256
# Smaller parameters (norms, biases) keep float32 moments, as in the library's own optimizer.
LEAST = 4096
_MISSING = (
    "optimizer.moments is '8bit', which needs the package bitsandbytes: "
    "pip install 'posttrain[low-memory]', or set optimizer.moments: float32"
)


def why_missing() -> str | None:
    """What to install before moments can be of 8 bits; None if they can."""
    return None if importlib.util.find_spec("bitsandbytes") else _MISSING


class EightBit:
    """AdamW's step on a part of a parameter whose moments are of 8 bits."""

    def __init__(self, section: OptimizerSection) -> None:
        if (reason := why_missing()) is not None:
            raise ResourceError(reason)
        import bitsandbytes.functional

        self._library: Any = bitsandbytes.functional
        self._section = section
        self._maps: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @staticmethod
    def fresh(param: Tensor) -> dict[str, Tensor]:
        scales = (math.ceil(param.numel() / BLOCK),)
        return {
            "exp_avg": torch.zeros(param.shape, dtype=torch.uint8, device=param.device),
            "exp_avg_sq": torch.zeros(param.shape, dtype=torch.uint8, device=param.device),
            "exp_avg_scale": torch.zeros(scales, device=param.device),
            "exp_avg_sq_scale": torch.zeros(scales, device=param.device),
        }

    def update(
        self, weights: Tensor, grad: Tensor, moments: dict[str, Tensor], rate: float, step: int
    ) -> None:
        """Move float32 `weights` [n] by `grad` [n]; `moments` are those of `fresh`, of this part.

        `step` counts from 1.
        """
        signed, unsigned = self._maps_on(weights.device)
        beta1, beta2 = self._section.betas
        self._library.optimizer_update_8bit_blockwise(
            "adam",
            grad,
            weights,
            moments["exp_avg"],
            moments["exp_avg_sq"],
            beta1,
            beta2,
            0.0,  # of optimizers with a third moment
            0.0,
            self._section.eps,
            step,
            rate,
            signed,
            unsigned,
            moments["exp_avg_scale"],
            moments["exp_avg_sq_scale"],
            self._section.weight_decay,
        )

    def _maps_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The values of the 256 codes, of both moments."""
        if device not in self._maps:
            signed = self._library.create_dynamic_map(signed=True)
            unsigned = self._library.create_dynamic_map(signed=False)
            self._maps[device] = signed.to(device), unsigned.to(device)
        return self._maps[device]


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
