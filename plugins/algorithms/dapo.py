"""The DAPO preset: clip-higher, token mean, no KL, no prompt without a signal."""

from __future__ import annotations

from posttrain.core.contracts import Algorithm, NoConfig


class Dapo(Algorithm[NoConfig]):
    """L = (1 / N_tok) sum_it clip loss(A_i, r_it; 0.2, 0.28), mixed groups only.

    Prompts answered all right or all wrong are replaced by others until the batch is full (sampler
    `dynamic`); the reward is +1 or -1 and a penalty that grows before the length limit. With
    `sampler: group` and `drop_groups: equal_accuracy` such prompts are only left out.
    Source: arXiv:2503.14476, eq. 8 and section 3.
    """

    name = "dapo"
    Config = NoConfig
    fields = {
        "advantage": "grpo",
        "policy_loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28},
        "aggregator": "token-mean",
        "kl": {"controller": {"name": "fixed", "coef": 0.0}},
        "sampler": "dynamic",
        "rewards": ["dapo_rule", "soft_overlong"],
    }
