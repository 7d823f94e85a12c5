"""The RLOO preset: REINFORCE against the mean of the other responses."""

from __future__ import annotations

from posttrain.core.contracts import Algorithm, NoConfig


class Rloo(Algorithm[NoConfig]):
    """L = -(1 / N_seq) sum_i A_i log pi(y_i), A_i = R_i - mean of the others; R_i less 0.03 * KL.

    The KL is that of the whole sequence, in the reward. One update per rollout batch.
    Source: arXiv:2402.14740, eq. 8 and appendix C (beta 0.03).
    """

    name = "rloo"
    Config = NoConfig
    fields = {
        "advantage": "rloo",
        "policy_loss": "vanilla_pg",
        "aggregator": "seq-mean-token-sum",
        "kl": {
            "estimator": "k1",
            "controller": {"name": "fixed", "coef": 0.03},
            "place": "reward",
        },
    }
