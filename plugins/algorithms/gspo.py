"""The GSPO preset: one importance ratio per response, clipped as a whole."""

from __future__ import annotations

from posttrain.core.contracts import Algorithm, NoConfig


class Gspo(Algorithm[NoConfig]):
    """L = (1 / N_seq) sum_i max(-A_i s_i, -A_i clip(s_i, 1 - 3e-4, 1 + 4e-4)).

    s_i is the geometric mean of the response's token ratios. No KL.
    Source: arXiv:2507.18071, eq. 5 and section 5.1.
    """

    name = "gspo"
    Config = NoConfig
    fields = {
        "advantage": "grpo",
        "policy_loss": {"name": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
        "aggregator": "seq-mean-token-mean",
        "kl": {"controller": {"name": "fixed", "coef": 0.0}},
    }
