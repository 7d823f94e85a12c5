"""The PPO preset of RLHF: clipped ratios, GAE, a critic, adaptive KL in the reward."""

from __future__ import annotations

from posttrain.core.contracts import Algorithm, NoConfig


class Ppo(Algorithm[NoConfig]):
    """L = (1 / N_tok) sum_it clip loss(A_it, r_it), A = whitened GAE(1, 0.95) of r_it - beta k1_it.

    beta follows Ziegler's controller (6 nats per sequence); values are clipped at 0.2. Four passes
    over each batch.
    Sources: arXiv:1707.06347, eq. 7; KL in the reward and its controller: arXiv:1909.08593, 2.2.
    """

    name = "ppo"
    Config = NoConfig
    fields = {
        "advantage": {"name": "gae", "lam": 0.95, "whiten": "tokens"},
        "policy_loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
        "aggregator": "token-mean",
        "kl": {
            "estimator": "k1",
            "controller": {"name": "adaptive", "coef": 0.2, "target": 6.0, "horizon": 10000},
            "place": "reward",
        },
        "critic": {"clip": 0.2, "epochs": 4},
        "epochs": 4,
    }
