"""A policy loss: PPO's clipped ratio."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import PluginConfig, PolicyLoss, Prepared, TokenLoss
from posttrain.core.math.masking import masked


class ExampleConfig(PluginConfig):
    """Settings of `example`."""

    clip: float = Field(default=0.2, gt=0, lt=1, description="distance of the bounds from 1")


class Example(PolicyLoss[ExampleConfig]):
    """l = max(-A r, -A clip(r, 1 - clip, 1 + clip)) with r = exp(logprobs - old_logprobs), [B, T].

    Source: PPO, arXiv:1707.06347, eq. 7. It never reduces: the aggregator divides.
    """

    name = "example"
    Config = ExampleConfig
    idle_at_zero = True

    def token_loss(
        self, logprobs: Tensor, micro: RolloutBatch, prepared: Prepared | None = None
    ) -> TokenLoss:
        """Loss [B, T]; `masked` sets what lies under the mask to 0 before anything is computed."""
        mask, clip = micro.mask, self.config.clip
        advantages = masked(micro.column("advantages"), mask)
        ratio = masked(logprobs - micro.column("old_logprobs"), mask).exp()
        bounded = ratio.clamp(1 - clip, 1 + clip)
        loss = torch.maximum(-advantages * ratio, -advantages * bounded)
        clipped = (bounded != ratio).to(logprobs.dtype)
        return TokenLoss(loss, mask, {"plugin/clipped": clipped}, ratio)
