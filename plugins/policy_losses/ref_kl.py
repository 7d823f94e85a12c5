"""The policy gradient of the KL to a teacher, against the policy as it is at loss time."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import AnchoredConfig, AnchoredLoss, Prepared, TokenLoss
from posttrain.core.math import ratios
from posttrain.core.math.masking import masked
from posttrain.core.math.teacher_gap import taught

Distance = Annotated[float, Field(ge=0, le=1_000)]


class RefKlConfig(AnchoredConfig):
    """Settings of `ref_kl`; the defaults are prime-rl's."""

    anchor: Literal["old", "rollout"] = Field(
        default="rollout",
        description="whose log-probs the ratio is against: the engine's, or the trainer's of "
        "before the update",
    )
    mask_low: float | None = Field(
        default=0.2,
        gt=0,
        le=1,
        description="a token whose probability fell by more than this is left out; null = off",
    )
    drift: float = Field(
        default=1e-3, ge=0, le=1_000, description="factor of the squared log ratio; 0 = off"
    )
    clip: tuple[Distance, Distance] | None = Field(
        default=None,
        description="bounds [below, above] of the ratio's distance from 1, as of ppo_clip; null = "
        "off (verl: [0.2, 0.2])",
    )
    dual_clip: float | None = Field(
        default=None,
        gt=1,
        le=1_000,
        description="with clip: most a bad token counts (verl: 3)",
    )
    clamp: float | None = Field(
        default=None, gt=0, le=1_000, description="bound of the teacher's part, nats; null = off"
    )


class RefKlLoss(AnchoredLoss[RefKlConfig]):
    """l = -keep sg(teacher_logprobs - logprobs) r + drift (log r)^2, r = p / p_anchor [B, T].

    keep is 0 where p fell by more than `mask_low`; where no teacher scored the token the loss is
    0. With `clip` it is ppo_clip's loss of the advantage sg(teacher_logprobs - logprobs). On the
    first update it has the gradient of the transform `opd`. Log-probs are in nats.
    Source: prime-rl's `ref_kl`; verl's `use_policy_gradient` with clip and dual_clip.
    """

    name = "ref_kl"
    Config = RefKlConfig
    stops_gradients = True

    def required_columns(self) -> frozenset[str]:
        return frozenset({"teacher_logprobs", "teacher_id", f"{self.config.anchor}_logprobs"})

    def loss_mask(self, batch: RolloutBatch) -> Tensor:
        """The tokens [B, T] of responses that have a teacher, whether it scored each or not."""
        return taught(batch)

    def token_loss(
        self, logprobs: Tensor, micro: RolloutBatch, prepared: Prepared | None = None
    ) -> TokenLoss:
        """Loss [B, T], with ratio, the share left out and the gap to the teacher as metrics."""
        config, teacher = self.config, micro.column("teacher_logprobs")
        mask = masked(taught(micro), ~teacher.isnan())
        behaviour = self.anchor_logprobs(micro)
        log_ratio = ratios.log_ratios(logprobs, behaviour, mask, config.ratio_clamp)
        ratio = log_ratio.exp()
        gap = (masked(teacher.to(logprobs), mask) - masked(logprobs, mask)).detach()
        metrics = {"distil/reverse_kl": -gap, **ratios.ratio_metrics(ratio, log_ratio, mask)}
        if config.clamp is not None:
            gap = gap.clamp(-config.clamp, config.clamp)
        if config.clip is None:
            loss = -gap * ratio
        else:
            low, high = 1 - config.clip[0], 1 + config.clip[1]
            loss = ratios.clipped_loss(ratio, gap, low, high, config.dual_clip)
            metrics |= ratios.clip_metrics(ratio, gap, mask, low, high, config.dual_clip)
        if config.mask_low is not None:
            fall = masked(behaviour, mask).exp() - masked(logprobs, mask).detach().exp()
            gone = masked(fall > config.mask_low, mask)
            loss = torch.where(gone, torch.zeros_like(loss), loss)
            metrics["distil/masked_frac"] = gone.to(loss.dtype)
        return TokenLoss(loss + config.drift * log_ratio.square(), mask, metrics, ratio)
