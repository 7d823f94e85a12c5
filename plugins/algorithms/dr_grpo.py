"""The Dr. GRPO preset: GRPO without its two biases."""

from __future__ import annotations

from posttrain.core.contracts import Algorithm, NoConfig


class DrGrpo(Algorithm[NoConfig]):
    """L = (1 / (N_seq L)) sum_it clip loss(A_i, r_it), A_i = R_i - mean_g, L = the response limit.

    Neither long wrong answers nor very easy and very hard prompts weigh more. No KL.
    Source: arXiv:2503.20783, section 3.2.
    """

    name = "dr_grpo"
    Config = NoConfig
    fields = {
        "advantage": "dr_grpo",
        "policy_loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
        "aggregator": "seq-mean-token-sum-norm",
        "kl": {"controller": {"name": "fixed", "coef": 0.0}},
    }
