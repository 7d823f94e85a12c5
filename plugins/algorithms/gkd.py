"""The preset of GKD: a divergence from the teacher's distribution on what the policy samples."""

from __future__ import annotations

from posttrain.core.contracts import Algorithm, NoConfig


class Gkd(Algorithm[NoConfig]):
    """L = (1 / N_tok) sum_it JSD_0.5(p_T, p_S), fully on-policy; no reward, no advantage, no KL.

    The stage needs a teacher whose weights are at hand: `inputs: {teacher: <stage>}` or `teachers`.
    For one behind a server set `distillation: {support: topk, of: teacher}`.
    Source: GKD, arXiv:2306.13649, with beta 0.5 of TRL; temperature 1, where TRL has 0.9.
    """

    name = "gkd"
    Config = NoConfig
    fields = {
        "advantage": "zero",
        "policy_loss": None,
        "distillation": {"name": "gkd", "divergence": "jsd", "beta": 0.5},
        "aggregator": "token-mean",
        "kl": {"controller": {"name": "fixed", "coef": 0.0}},
        "rewards": [],
    }
