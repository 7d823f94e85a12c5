"""The CHORD preset: reinforcement learning and imitation of worked answers in one loss."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from posttrain.core.contracts import Algorithm, PluginConfig


class ChordConfig(PluginConfig):
    """Settings of `chord`."""

    variant: Literal["mu", "phi"] = Field(
        default="phi",
        description="mu: all tokens of an answer alike, mu falls from 0.9 to 0.05 in 200 steps; "
        "phi: tokens weighed by p (1 - p), mu stays at 0.1",
    )


class Chord(Algorithm[ChordConfig]):
    """L = (1 - mu) clip loss(A_i, r_it) + mu (1 / N_tok) sum_jt -w_jt log p(y*_jt).

    A_i = (R_i - mean R) / (std R + 1e-6) of the responses, y* are worked answers from the task or
    `ptx.path`, which share nothing with the responses: no advantages, and counts of their own. With
    `variant: phi` w = sg(p (1 - p)), else 1. mu is the `coef` of the term `ptx`. No KL.
    Source: arXiv:2508.11408, with the settings of Trinity-RFT.
    """

    name = "chord"
    Config = ChordConfig

    def expand(self) -> dict[str, object]:
        """Fields of an `rl` stage."""
        phi = self.config.variant == "phi"
        mu: dict[str, object] = (
            {"peak": 0.1} if phi else {"peak": 0.9, "decay": 200, "valley": 0.05}
        )
        experts = {"name": "ptx", "weighting": "phi" if phi else "none", "aggregator": "token-mean"}
        return {
            "advantage": {"name": "grpo", "norm_by_std": True},
            "policy_loss": [
                {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
                {**experts, "coef": {**mu, "complement": True}},
            ],
            "aggregator": "token-mean",
            "kl": {"controller": {"name": "fixed", "coef": 0.0}},
        }
