"""ECHO: the policy also learns to predict what its environment answers."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import PluginConfig, PolicyLoss, Prepared, TokenLoss
from posttrain.core.math.masking import masked


class EchoConfig(PluginConfig):
    """Settings of `echo`."""

    alpha: float = Field(
        default=0.1, gt=0, le=100, description="weight of an observed token (prime-rl: 0.1)"
    )


class EchoLoss(PolicyLoss[EchoConfig]):
    """l = -alpha * logprobs [B, T], nats at temperature 1, on the tokens of observations.

    These are the tokens of a response that the policy did not sample, what a chat template writes
    around an answer included. Neither the prompt nor sampled tokens are among them. The term has
    counts of its own: N_tok is the number of observed tokens, and those of the other terms are as
    without it. Episodes that failed or are unscored take part.
    Source: ECHO (Microsoft, 2026), as in prime-rl.
    """

    name = "echo"
    Config = EchoConfig
    needs = frozenset()
    source: ClassVar[Literal["rollout", "ptx", "observations"]] = "observations"
    uses_ratio = False

    def token_loss(
        self, logprobs: Tensor, micro: RolloutBatch, prepared: Prepared | None = None
    ) -> TokenLoss:
        """Loss [B, T] of every token in the mask, which is that of observations here."""
        return TokenLoss(-self.config.alpha * masked(logprobs, micro.mask), micro.mask)
