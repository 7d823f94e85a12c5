"""The SAPO preset: a smooth gate on the ratio instead of a clip."""

from __future__ import annotations

from posttrain.core.contracts import Algorithm, NoConfig


class Sapo(Algorithm[NoConfig]):
    """L = (1 / N_seq) sum_i (1 / n_i) sum_t -A_i (4 / tau) sigmoid(tau (r_it - 1)).

    tau is 1.0 where A > 0 and 1.05 elsewhere: bad tokens are forgotten a little sooner.
    Source: arXiv:2511.20347, eq. 5 and 6, section 5.1.
    """

    name = "sapo"
    Config = NoConfig
    fields = {
        "advantage": "grpo",
        "policy_loss": {"name": "sapo", "tau_pos": 1.0, "tau_neg": 1.05},
        "aggregator": "seq-mean-token-mean",
        "kl": {"controller": {"name": "fixed", "coef": 0.0}},
    }
