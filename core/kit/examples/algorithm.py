"""A preset: GRPO without a KL term, and with a wider clip above."""

from __future__ import annotations

from posttrain.core.contracts import Algorithm, NoConfig


class Example(Algorithm[NoConfig]):
    """L = (1 / N_tok) sum_it clip loss(A_i, r_it), A_i by group. Source: an example, after DAPO.

    It names one plugin per axis; what it does not name has the stage's default, and users can
    override any of it in the YAML. A plugin in a file next to this one is `"other.py:CLASS"`.
    """

    name = "example"
    Config = NoConfig
    fields = {
        "advantage": "grpo",
        "policy_loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28},
        "aggregator": "token-mean",
        "kl": {"controller": {"name": "fixed", "coef": 0.0}},
    }
