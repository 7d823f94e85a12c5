"""The ARPO preset: advantages over a tree of tool-using responses."""

from __future__ import annotations

from posttrain.core.contracts import Algorithm, NoConfig


class Arpo(Algorithm[NoConfig]):
    """GRPO's advantages over all leaves of a prompt, clipped token loss, token mean, no KL.

    Tokens that leaves share take each leaf's advantage in turn (`attribution: soft`) or the mean
    (`hard`). The sampler branches where a tool result leaves the policy uncertain, so the stage
    needs an environment; with `sampler: group`, every response is a leaf and this is GRPO with a
    token mean.
    Source: arXiv:2507.19849, sections 3.1 and 3.2.
    """

    name = "arpo"
    Config = NoConfig
    fields = {
        "sampler": "arpo_tree",
        "advantage": {"name": "grpo", "attribution": "soft"},
        "policy_loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
        "aggregator": "token-mean",
        "kl": {"controller": {"name": "fixed", "coef": 0.0}},
    }
