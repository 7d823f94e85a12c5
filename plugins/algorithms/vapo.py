"""The VAPO preset: a pre-trained critic, lambda by length, and a pull to right answers."""

from __future__ import annotations

from posttrain.core.contracts import Algorithm, NoConfig


class Vapo(Algorithm[NoConfig]):
    """L = clip loss(A_it, r_it; 0.2, 0.28) + 0.1 * NLL of right answers, own counts each.

    The critic learns from lambda 1, the policy from 1 - 1/(0.05 n_i); for the first 50 rollout
    batches, at most, the critic alone is trained.
    Source: arXiv:2504.05118, section 4 and 5.1.
    """

    name = "vapo"
    Config = NoConfig
    fields = {
        "advantage": "decoupled_gae",
        "policy_loss": [
            {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28},
            {"name": "positive_lm", "coef": 0.1, "aggregator": "token-mean"},
        ],
        "aggregator": "token-mean",
        "kl": {"controller": {"name": "fixed", "coef": 0.0}},
        "critic": {"pretrain_steps": 50},
    }
