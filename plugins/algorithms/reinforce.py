"""The REINFORCE preset: the plain policy gradient with a baseline."""

from __future__ import annotations

from posttrain.core.contracts import Algorithm, NoConfig


class Reinforce(Algorithm[NoConfig]):
    """L = -(1 / N_seq) sum_i A_i log pi(y_i), A_i = R_i - mean of the batch's rewards.

    No ratio, no clip, no KL: for one update per rollout batch.
    Source: Williams 1992, "Simple statistical gradient-following algorithms", sections 3 and 4.
    """

    name = "reinforce"
    Config = NoConfig
    fields = {
        "advantage": "reinforce_baseline",
        "policy_loss": "vanilla_pg",
        "aggregator": "seq-mean-token-sum",
        "kl": {"controller": {"name": "fixed", "coef": 0.0}},
    }
