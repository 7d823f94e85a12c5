"""The TRPO preset: a natural-gradient step inside a KL bound."""

from __future__ import annotations

from posttrain.core.contracts import Algorithm, NoConfig


class Trpo(Algorithm[NoConfig]):
    """maximise E[r A] subject to E[KL(pi_old || pi)] <= 0.01, by conjugate gradient.

    Ten CG iterations, damping 0.1; advantages by GAE with lambda 0.95. Needs float32 and five flat
    copies of the parameters: for small models or adapters.
    Source: arXiv:1502.05477, section 6 and appendix C.
    """

    name = "trpo"
    Config = NoConfig
    fields = {
        "advantage": {"name": "gae", "lam": 0.95},
        "policy_loss": {"name": "trpo", "delta": 0.01, "damping": 0.1, "cg_iters": 10},
        "aggregator": "token-mean",
        "kl": {"controller": {"name": "fixed", "coef": 0.0}},
        "critic": {},
    }
