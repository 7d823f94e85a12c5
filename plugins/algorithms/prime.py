"""The PRIME preset: a process reward model that is trained along, on outcomes alone."""

from __future__ import annotations

from posttrain.core.contracts import Algorithm, NoConfig


class Prime(Algorithm[NoConfig]):
    """L = clip loss(A_it, r_it), A_it of the outcome and of q_it = 0.05 (log p_prm - log p_ref).

    The process reward model begins as the stage's model and learns in every step whether the
    responses were right: cross entropy between sigmoid(sum_t q_it) and the verdict. Its rewards are
    those of before that. No KL. Groups of 4 in the paper.
    Source: PRIME, arXiv:2502.01456, with the settings of its recipe in verl.
    """

    name = "prime"
    Config = NoConfig
    fields = {
        "advantage": {"name": "prime", "process_coef": 5.0, "outcome_coef": 5.0},
        "implicit_prm": {"beta": 0.05},
        "policy_loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
        "aggregator": "token-mean",
        "kl": {"controller": {"name": "fixed", "coef": 0.0}},
        "rewards": ["accuracy"],
    }
