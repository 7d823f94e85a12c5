"""IW-OPD: on-policy distillation in which early tokens of a response weigh more."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import Advantages, AdvantageTransform, PluginConfig
from posttrain.core.math.masking import masked
from posttrain.core.math.teacher_gap import teacher_gap


class IwOpdConfig(PluginConfig):
    """Settings of `iw_opd`."""

    coef: float = Field(default=1.0, ge=0, le=1_000, description="factor of the teacher's part")
    anchor: Literal["old", "rollout"] = Field(
        default="rollout",
        description="whose log-probs the teacher's are compared with: the trainer's of before the "
        "update, or the engine's",
    )
    gamma: float = Field(
        default=0.5, ge=0, le=1_000, description="further weight of the first token; 0 = opd"
    )
    eps: float = Field(
        default=1e-8, gt=0, le=1_000, description="least sum of gaps that is divided by, nats"
    )


class IwOpdTransform(AdvantageTransform[IwOpdConfig]):
    """A'_t = A_t + coef * w_t a_t, w_t = 1 + gamma (1 - u_t / U), a = teacher_logprobs - anchor's.

    u_t is the sum of |a| over the response's tokens before t and U = max(sum of |a|, eps), so that
    w [B, T] falls from 1 + gamma and does not change when all a are scaled. With `vanilla_pg` it is
    the published loss. Source: arXiv:2606.22600, as in TRL.
    """

    name = "iw_opd"
    Config = IwOpdConfig

    def required_columns(self) -> frozenset[str]:
        return frozenset({"teacher_logprobs", f"{self.config.anchor}_logprobs"})

    def carries_signal(self) -> bool:
        return self.config.coef != 0

    def transform(self, advantages: Tensor, batch: RolloutBatch) -> Advantages:
        """Advantages [B, T]."""
        config, gap = self.config, teacher_gap(batch, self.config.anchor)
        size = gap.abs()
        before = size.cumsum(dim=1) - size
        total = size.sum(dim=1, keepdim=True).clamp(min=config.eps)
        weight = 1 + config.gamma * (1 - before / total)
        changed = masked(advantages.double(), batch.mask) + config.coef * weight * gap
        return Advantages(changed.to(advantages.dtype), metrics=_of_weights(weight, batch.mask))


def _of_weights(weight: Tensor, mask: Tensor) -> dict[str, float]:
    kept = weight[mask.bool()]
    if kept.numel() == 0:
        return {}
    return {
        "distil/weight_mean": float(kept.mean()),
        "distil/weight_min": float(kept.min()),
        "distil/weight_max": float(kept.max()),
    }
