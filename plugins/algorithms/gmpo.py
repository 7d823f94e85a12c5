"""The GMPO preset: the geometric mean of a response's clipped token ratios."""

from __future__ import annotations

from posttrain.core.contracts import Algorithm, NoConfig


class Gmpo(Algorithm[NoConfig]):
    """L = -(1 / N_seq) sum_i A_i exp((1 / n_i) sum_t d_it), d = log r clipped at +-0.4.

    Source: arXiv:2507.20673, eq. 4 and section 3.2.
    """

    name = "gmpo"
    Config = NoConfig
    fields = {
        "advantage": "grpo",
        "policy_loss": {"name": "gmpo", "log_clip_low": 0.4, "log_clip_high": 0.4},
        "aggregator": "seq-mean-token-mean",
        "kl": {"controller": {"name": "fixed", "coef": 0.0}},
    }
