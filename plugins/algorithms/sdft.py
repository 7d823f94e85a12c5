"""The preset of self-distillation from demonstrations: the policy that has read one teaches it."""

from __future__ import annotations

from posttrain.core.contracts import Algorithm, NoConfig


class Sdft(Algorithm[NoConfig]):
    """L = (1 / N_seq) sum_i (1 / n_i) sum_t min(r_it, 2) JSD_0.5(p_T, p_S), p_T = p_base(y_t |
    question and demonstration, y_<t), p_S = p(y_t | question, y_<t); no reward, no advantage.

    r = p / p_old is held constant. The teacher is the stage's input model, which reads the
    problem's worked answer: `teachers.self.policy` says otherwise. Over the policy's 100 best
    tokens, renormalised.
    Source: arXiv:2601.19897, with the settings of TRL.
    """

    name = "sdft"
    Config = NoConfig
    fields = {
        "advantage": "zero",
        "policy_loss": None,
        "distillation": {
            "name": "gkd",
            "divergence": "jsd",
            "beta": 0.5,
            "support": "topk",
            "of": "student",
            "top_k": 100,
            "rest": "renorm",
            "ratio_cap": 2.0,
        },
        "teachers": {"self": {"policy": {"weights": "base", "context": "worked"}}},
        "aggregator": "seq-mean-token-mean",
        "kl": {"controller": {"name": "fixed", "coef": 0.0}},
        "rewards": [],
    }
