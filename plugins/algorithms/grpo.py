"""The GRPO preset: group-relative advantages, clipped ratios, k3 to the reference in the loss."""

from __future__ import annotations

from posttrain.core.contracts import Algorithm, NoConfig


class Grpo(Algorithm[NoConfig]):
    """L = (1 / N_seq) sum_i (1 / n_i) sum_t [clip loss(A_i, r_it) + 0.04 * k3_it].

    One plugin per axis; any of them can be overridden in the stage's own YAML.
    Source: DeepSeekMath, arXiv:2402.03300, eq. 3 and section 4.2.
    """

    name = "grpo"
    Config = NoConfig
    fields = {
        "advantage": "grpo",
        "policy_loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
        "aggregator": "seq-mean-token-mean",
        "kl": {
            "estimator": "k3",
            "controller": {"name": "fixed", "coef": 0.04},
            "place": "loss",
        },
    }
