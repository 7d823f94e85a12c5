"""Off-policy sequence masking: drop bad responses that the policy has moved away from."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import CorrectionConfig, GeneralCorrection
from posttrain.core.math.correction import known_tokens, log_ratio, off_policy_rows


class OpsmConfig(CorrectionConfig):
    """Settings of `opsm`."""

    delta: float = Field(
        default=1e-4, ge=0, description="largest mean anchor - current log-prob kept, nats (slime)"
    )
    anchor: Literal["roll", "old"] = Field(
        default="roll",
        description="distance is from the engine's log-probs, or from the trainer's old ones",
    )


class Opsm(GeneralCorrection[OpsmConfig]):
    """Keep token t of response i iff A_it >= 0 or mean_s(anchor_is - sg(logprobs_is)) <= delta.

    The mean is over the response's tokens whose anchor is known, under the *current* log-probs, so
    it is taken in every micro-batch. Good responses are never dropped. Tokens have no weight.
    Source: DeepSeek-V3.2, arXiv:2512.02556, section 3.1.
    """

    name = "opsm"
    Config = OpsmConfig

    def keeps(self, logprobs: Tensor, micro: RolloutBatch) -> Tensor:
        """Tokens [B, T] to keep."""
        roll = self.config.anchor == "roll"
        anchor = micro.rollout_logprobs if roll else micro.column("old_logprobs")
        known = known_tokens(anchor, micro.mask)
        moved = off_policy_rows(-log_ratio(logprobs, anchor, micro.mask), known, self.config.delta)
        kept = (micro.column("advantages") >= 0) | ~moved
        return (micro.mask.bool() & kept).to(micro.mask.dtype)
