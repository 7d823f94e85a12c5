"""Negative log-likelihood of the chosen answers, as a term added to a preference loss."""

from __future__ import annotations

from torch import Tensor

from posttrain.core.contracts import NoConfig, PairLoss, PairScores, Prepared


class SftLoss(PairLoss[NoConfig]):
    """l = -S(c) * num_pairs / num_chosen_tokens [B], S(c) the chosen answer's log-prob.

    Its mean over the pairs is the mean over all chosen tokens of the mini-batch, however long each
    answer is. The rejected answers take no part, nor does the reference.
    Source: the NLL term of RPO, arXiv:2404.19733 eq. 1; token mean as in TRL.
    """

    name = "sft"
    Config = NoConfig
    needs_reference = False
    reads_scores = False

    def pair_loss(self, pairs: PairScores, prepared: Prepared | None = None) -> Tensor:
        """Share [B] of each pair."""
        return pairs.token_mean_nll()
