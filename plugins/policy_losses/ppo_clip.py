"""PPO's clipped token loss (arXiv:1707.06347, eq. 7), with DAPO's two bounds and the dual clip."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import PluginConfig, PolicyLoss, TokenLoss
from posttrain.core.hooks import hookimpl
from posttrain.core.math.masking import masked


class PpoClipConfig(PluginConfig):
    """Settings of `ppo_clip`."""

    clip_low: float = Field(default=0.2, ge=0, le=1, description="ratio floor is 1 - clip_low")
    clip_high: float = Field(
        default=0.2, ge=0, description="ratio ceiling is 1 + clip_high (DAPO: 0.28)"
    )
    dual_clip_c: float | None = Field(
        default=None, gt=1, description="bound c of the loss where A < 0 (usual: 3); null = off"
    )
    ratio_clamp: float | None = Field(
        default=20.0, gt=0, description="bound of |log ratio|, nats; no gradient beyond; null = off"
    )


def clipped_loss(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip_c: float | None = None,
) -> Tensor:
    """Loss [B, T] of `log_ratio` and `advantages` [B, T].

    The gradient in the log ratio is -r * A, and exactly 0 where A > 0 and r > 1 + clip_high, where
    A < 0 and r < 1 - clip_low, and, with a dual clip, where A < 0 and r > c.
    """
    ratio = log_ratio.exp()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(-advantages * ratio, -advantages * bounded)
    if dual_clip_c is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip_c), loss)


class PpoClipLoss(PolicyLoss[PpoClipConfig]):
    """l = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), r = exp(logprobs - old_logprobs).

    With `dual_clip_c: c` and A < 0: min(l, -A c). All tensors are [B, T]; masked tokens have loss 0
    and gradient 0 whatever they hold.
    Sources: PPO arXiv:1707.06347 eq. 7; dual clip arXiv:1912.09729 eq. 4; two bounds: DAPO
    arXiv:2503.14476 eq. 8.
    """

    name = "ppo_clip"
    Config = PpoClipConfig

    def token_loss(self, logprobs: Tensor, micro: RolloutBatch) -> TokenLoss:
        """Loss [B, T], with ratio, clip fractions and KL to the sampling policy as metrics."""
        config, mask = self.config, micro.mask
        # Inputs are masked, not the result: exp of garbage would send NaN back.
        advantages = masked(micro.column("advantages"), mask)
        log_ratio = masked(logprobs, mask) - masked(micro.column("old_logprobs"), mask)
        bound = config.ratio_clamp
        clamped = log_ratio if bound is None else log_ratio.clamp(-bound, bound)
        loss = clipped_loss(
            clamped,
            advantages,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip_c=config.dual_clip_c,
        )
        return TokenLoss(loss, mask, self._metrics(clamped.detach(), advantages, mask))

    def _metrics(self, log_ratio: Tensor, advantages: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Metrics [B, T] (0/1 for the fractions), 0 at masked tokens."""
        ratio, rises, falls = log_ratio.exp(), advantages > 0, advantages < 0
        dual = self.config.dual_clip_c
        flags = {
            "clip/high_frac": rises & (ratio > 1 + self.config.clip_high),
            "clip/low_frac": falls & (ratio < 1 - self.config.clip_low),
            "clip/dual_frac": falls & (ratio > (float("inf") if dual is None else dual)),
        }
        values = {
            "ratio": ratio,
            **{name: flag.to(ratio.dtype) for name, flag in flags.items()},
            "kl/old_k1": -log_ratio,
            "kl/old_k3": log_ratio.expm1() - log_ratio,
        }
        return {name: masked(value, mask) for name, value in values.items()}


@hookimpl
def posttrain_register() -> list[type[PpoClipLoss]]:
    """Offer this plugin."""
    return [PpoClipLoss]
