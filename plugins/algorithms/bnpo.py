"""The BNPO preset of TRL: a token mean over each micro-batch's own tokens."""

from __future__ import annotations

from posttrain.core.contracts import Algorithm, NoConfig


class Bnpo(Algorithm[NoConfig]):
    """L = mean over micro-batches of [(1 / N_tok of the micro-batch) sum_it clip loss(A_i, r_it)].

    GRPO with another divisor, which makes `micro_batch_size` part of the algorithm: here to compare
    with runs of TRL. `token-mean` with global counts is the exact form of it.
    Source: TRL 1.16, `loss_type="bnpo"`.
    """

    name = "bnpo"
    Config = NoConfig
    variant_of = "grpo"
    fields = {
        "advantage": "grpo",
        "policy_loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
        "aggregator": {"name": "token-mean", "counts": "micro", "allow_local": True},
        "kl": {"controller": {"name": "fixed", "coef": 0.0}},
    }
