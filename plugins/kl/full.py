"""The exact KL over the whole vocabulary: no sampling error, but both models' logits."""

from __future__ import annotations

from torch import Tensor

from posttrain.core.contracts import KlEstimator, NoConfig
from posttrain.core.errors import RunError


class FullKl(KlEstimator[NoConfig]):
    """full = sum_v p_v (log p_v - log q_v) of each token's two distributions over the vocabulary.

    Exact in value and, given the prefix, in gradient; never negative. Tokens that the policy cannot
    draw (logit -inf) count 0. It costs the reference's logits again in every micro-batch.
    Formula: the definition of KL(policy || reference).
    """

    name = "full"
    Config = NoConfig
    from_logits = True

    def kl(self, logprobs: Tensor, ref_logprobs: Tensor, ratio: Tensor | None = None) -> Tensor:
        """Not from the log-probs of sampled tokens alone."""
        raise RunError(
            "kl 'full' is computed from the logits of both policies, not from sampled log-probs: "
            "use it with kl.place: loss, or choose k1 for a KL in the reward"
        )

    def kl_of_logits(self, logits: Tensor, ref_logits: Tensor) -> Tensor:
        """KL [N] in nats of logits [N, V]; gradient flows through `logits`."""
        logprobs, ref_logprobs = logits.log_softmax(-1), ref_logits.log_softmax(-1)
        probabilities = logprobs.exp()
        # 0 log 0 is 0: the log-ratio is masked before it meets the probability.
        impossible = probabilities.detach() == 0
        gap = logprobs.masked_fill(impossible, 0.0) - ref_logprobs.masked_fill(impossible, 0.0)
        return (probabilities * gap).sum(-1)
