"""The pre-training mix of PPO-ptx: a language-model loss on its own batches (arXiv:2203.02155)."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import NoConfig, PolicyLoss, Prepared, TokenLoss
from posttrain.core.math.masking import masked


class PtxLoss(PolicyLoss[NoConfig]):
    """l = -logprobs [B, T], nats, on the tokens of a pre-training batch.

    The batch and its counts are its own and share nothing with the rollout's. The paper's factor
    gamma = 27.8 is the term's `coef`; it writes the objective, of which this is the negative.
    Source: InstructGPT, arXiv:2203.02155, eq. 2.
    """

    name = "ptx"
    Config = NoConfig
    needs = frozenset()
    source: ClassVar[Literal["rollout", "ptx", "observations"]] = "ptx"
    uses_ratio = False

    def token_loss(
        self, logprobs: Tensor, micro: RolloutBatch, prepared: Prepared | None = None
    ) -> TokenLoss:
        """Loss [B, T] of every token that the batch's mask keeps."""
        return TokenLoss(-masked(logprobs, micro.mask), micro.mask)
