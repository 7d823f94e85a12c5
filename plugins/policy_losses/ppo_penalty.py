"""PPO with an adaptive KL penalty instead of a clip (arXiv:1707.06347, section 4)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import PolicyLoss, Prepared, RatioConfig, TokenLoss
from posttrain.core.math import ratios
from posttrain.core.math.kl import halving_factor
from posttrain.core.math.masking import masked


class PpoPenaltyConfig(RatioConfig):
    """Settings of `ppo_penalty`."""

    beta: float = Field(
        default=1.0, gt=0, le=1_000, description="penalty per nat on the first rollout batch"
    )
    kl_target: float = Field(
        default=0.01, gt=0, description="KL per token that one rollout batch should move, nats"
    )
    band: float = Field(
        default=1.5, gt=1, description="beta changes below target / band and above target * band"
    )
    step: float = Field(default=2.0, gt=1, description="factor by which beta falls or rises")


class PpoPenaltyLoss(PolicyLoss[PpoPenaltyConfig]):
    """l = -A r + beta (r - 1 - log r), r = exp(logprobs - old_logprobs); all [B, T].

    The second term is k3 on samples of the old policy: unbiased for KL(old || new) in value and in
    gradient, which is beta (r - 1) in a token's log-prob. After the updates on a rollout batch the
    measured KL halves beta when it is under kl_target / 1.5, and doubles it over kl_target * 1.5.
    Source: PPO, arXiv:1707.06347, eq. 8 and the rule below it.
    """

    name = "ppo_penalty"
    Config = PpoPenaltyConfig

    def __init__(self, config: PpoPenaltyConfig) -> None:
        super().__init__(config)
        self.beta = config.beta

    def token_loss(
        self, logprobs: Tensor, micro: RolloutBatch, prepared: Prepared | None = None
    ) -> TokenLoss:
        """Loss [B, T], with ratio, KL to the old policy and beta as metrics."""
        mask, bound = micro.mask, self.config.ratio_clamp
        advantages = masked(micro.column("advantages"), mask)
        log_ratio = ratios.log_ratios(logprobs, micro.column("old_logprobs"), mask, bound)
        ratio = log_ratio.exp()
        loss = self.beta * (log_ratio.expm1() - log_ratio) - advantages * ratio
        metrics = ratios.ratio_metrics(ratio, log_ratio, mask)
        metrics["kl/penalty_beta"] = torch.full_like(metrics["ratio"], self.beta)
        return TokenLoss(loss, mask, metrics, ratio)

    def wants_phase_kl(self) -> bool:
        """beta follows the KL of each rollout batch."""
        return True

    def on_phase_end(self, stats: Mapping[str, float]) -> None:
        """Adapt beta to how far the rollout batch moved the policy; unknown = leave it."""
        moved = stats.get("kl/phase_k3")
        if moved is not None:
            config = self.config
            self.beta *= halving_factor(moved, config.kl_target, config.step, config.band)

    def state(self) -> dict[str, float]:
        """beta."""
        return {"beta": self.beta}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Continue with a checkpoint's beta."""
        self.beta = state["beta"]
