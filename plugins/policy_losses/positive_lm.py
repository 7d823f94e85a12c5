"""The language-model loss on correct responses, VAPO's auxiliary term (arXiv:2504.05118)."""

from __future__ import annotations

from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import NoConfig, PolicyLoss, Prepared, TokenLoss
from posttrain.core.math.masking import masked


class PositiveLmLoss(PolicyLoss[NoConfig]):
    """l = -logprobs on the tokens of responses with `acc` >= 1, none elsewhere; all [B, T].

    Its counts are of those tokens alone, so with `token-mean` it is the mean negative
    log-likelihood of the correct tokens; without a correct response it is 0. The paper's factor
    mu = 0.1 is the term's `coef`. Source: VAPO, arXiv:2504.05118, "positive example LM loss".
    """

    name = "positive_lm"
    Config = NoConfig
    needs = frozenset({"acc"})
    uses_ratio = False

    def loss_mask(self, batch: RolloutBatch) -> Tensor:
        """The tokens [B, T] of correct responses; a response without a verdict (NaN) is not one."""
        return masked(batch.mask, (batch.column("acc") >= 1)[:, None])

    def token_loss(
        self, logprobs: Tensor, micro: RolloutBatch, prepared: Prepared | None = None
    ) -> TokenLoss:
        """Loss [B, T] in nats, and the mask of the correct responses' tokens."""
        mask = self.loss_mask(micro)
        return TokenLoss(-masked(logprobs, mask), mask)
