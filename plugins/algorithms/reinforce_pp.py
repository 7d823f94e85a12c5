"""The REINFORCE++ preset: PPO's loss without a critic, whitened over the batch."""

from __future__ import annotations

from posttrain.core.contracts import Algorithm, NoConfig


class ReinforcePp(Algorithm[NoConfig]):
    """L = (1 / N_tok) sum_it clip loss(A_it, r_it), A = whitened reward-to-go of R - 0.01 k1_it.

    Source: arXiv:2501.03262, section 3.
    """

    name = "reinforce_pp"
    Config = NoConfig
    fields = {
        "advantage": "reinforce_pp",
        "policy_loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
        "aggregator": "token-mean",
        "kl": {
            "estimator": "k1",
            "controller": {"name": "fixed", "coef": 0.01},
            "place": "reward",
        },
    }
