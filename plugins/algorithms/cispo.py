"""The CISPO preset: clipped importance weights, no token ever loses its gradient."""

from __future__ import annotations

from posttrain.core.contracts import Algorithm, NoConfig


class Cispo(Algorithm[NoConfig]):
    """L = -(1 / N_tok) sum_it sg(clip(r_it, 0, 5)) A_i log pi(y_it).

    Source: MiniMax-M1, arXiv:2506.13585, eq. 4 and 5 (its upper bound is not given; 5 as in SkyRL).
    """

    name = "cispo"
    Config = NoConfig
    fields = {
        "advantage": "grpo",
        "policy_loss": {"name": "cispo", "clip_low": 1.0, "clip_high": 4.0},
        "aggregator": "token-mean",
        "kl": {"controller": {"name": "fixed", "coef": 0.0}},
    }
