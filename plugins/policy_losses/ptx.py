"""The pre-training mix of PPO-ptx: a language-model loss on its own batches (arXiv:2203.02155)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import PluginConfig, PolicyLoss, Prepared, TokenLoss
from posttrain.core.math.likelihood import TokenWeight, token_nll


class PtxConfig(PluginConfig):
    """Settings of `ptx`."""

    weighting: TokenWeight = Field(
        default="none",
        description="weigh each token's loss by its probability p (dft) or by p (1 - p) (phi)",
    )


class PtxLoss(PolicyLoss[PtxConfig]):
    """l = -w logprobs [B, T], nats, on the tokens of a pre-training batch; w = 1 by default.

    The batch and its counts are its own and share nothing with the rollout's. The paper's factor
    gamma = 27.8 is the term's `coef`; it writes the objective, of which this is the negative.
    With `weighting: dft` w = p, with `phi` w = p (1 - p), p = exp(logprobs) held constant; the
    counts are those of all tokens whatever they weigh.
    Sources: InstructGPT, arXiv:2203.02155, eq. 2; DFT, arXiv:2508.05629, eq. 9; CHORD,
    arXiv:2508.11408.
    """

    name = "ptx"
    Config = PtxConfig
    needs = frozenset()
    source: ClassVar[Literal["rollout", "ptx", "observations"]] = "ptx"
    uses_ratio = False

    def token_loss(
        self, logprobs: Tensor, micro: RolloutBatch, prepared: Prepared | None = None
    ) -> TokenLoss:
        """Loss [B, T] of every token that the batch's mask keeps."""
        return TokenLoss(token_nll(logprobs, micro.mask, self.config.weighting), micro.mask)
