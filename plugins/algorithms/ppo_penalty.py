"""The PPO-penalty preset: a KL to the sampling policy instead of a clip."""

from __future__ import annotations

from posttrain.core.contracts import Algorithm, NoConfig


class PpoPenalty(Algorithm[NoConfig]):
    """L = (1 / N_tok) sum_it [-A_it r_it + beta KL(pi_old || pi)_it], beta adapted per batch.

    beta doubles when the batch moved the policy by more than 1.5 times the target, and halves below
    the target over 1.5. Several passes over each batch make it matter.
    Source: arXiv:1707.06347, section 4, eq. 8.
    """

    name = "ppo_penalty"
    Config = NoConfig
    fields = {
        "advantage": {"name": "gae", "lam": 0.95},
        "policy_loss": "ppo_penalty",
        "aggregator": "token-mean",
        "kl": {"controller": {"name": "fixed", "coef": 0.0}},
        "critic": {"epochs": 4},
        "epochs": 4,
    }
