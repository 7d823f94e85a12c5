"""The GiGPO preset: credit for turns that were taken in the same state."""

from __future__ import annotations

from posttrain.core.contracts import Algorithm, NoConfig


class Gigpo(Algorithm[NoConfig]):
    """A_is = z_g(R_i) + z_k(G_is) on the tokens of turn s, clipped token loss, 0.01 * k3.

    G_is is the return from turn s on, discounted by 0.95 per turn, and k the turns of the group
    that began in the same state. The stage needs an environment, and pays off where episodes come
    to the same state again, as in games and web pages; where none does it is GRPO with a token
    mean. Rewards: `environment` for the environment's own outcome.
    Source: arXiv:2505.10978; the KL and the aggregator are those of its released code.
    """

    name = "gigpo"
    Config = NoConfig
    fields = {
        "advantage": {"name": "gigpo", "gamma": 0.95, "turn_weight": 1.0},
        "policy_loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
        "aggregator": "token-mean",
        "kl": {
            "estimator": "k3",
            "controller": {"name": "fixed", "coef": 0.01},
            "place": "loss",
        },
    }
