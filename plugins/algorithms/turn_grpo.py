"""The turn-level GRPO preset: each turn's own reward, next to the outcome."""

from __future__ import annotations

from posttrain.core.contracts import Algorithm, NoConfig


class TurnGrpo(Algorithm[NoConfig]):
    """A_is = z_g(r_is) + z_g(R_i) on the tokens of turn s, clipped token loss, no KL.

    r_is is what the environment gave for turn s, compared with the other episodes' turn s. The
    stage needs an environment that gives rewards for turns; where it gives none this is GRPO.
    Source: MT-GRPO, arXiv:2505.11821, eq. 7; no KL is the setting of its released scripts.
    """

    name = "turn_grpo"
    Config = NoConfig
    fields = {
        "advantage": "turn_grpo",
        "policy_loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
        "aggregator": "seq-mean-token-mean",
        "kl": {"controller": {"name": "fixed", "coef": 0.0}},
    }
