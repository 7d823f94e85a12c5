"""The preset of distillation from several teachers, each of which judges its own problems."""

from __future__ import annotations

from posttrain.core.contracts import Algorithm, NoConfig


class Mopd(Algorithm[NoConfig]):
    """A_t = log p_T(x)(y_t) - log p_old(y_t), T(x) the teacher of the problem's data set; clipped
    token loss over all tokens; no reward, no KL.

    The stage needs `teachers`, with the data sets that each of them judges as its `routes`;
    `teacher_routing.by` names the field of the problem that says which. A teacher weighs as many
    tokens as it judges. With `advantage: grpo` and rewards the teachers' part is added to theirs.
    Source: MOPD, arXiv:2606.30406; verl's routing by `data_source`.
    """

    name = "mopd"
    Config = NoConfig
    fields = {
        "advantage": "zero",
        "advantage_transform": {"name": "opd", "coef": 1.0, "gamma": 0.0},
        "policy_loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
        "teacher_routing": {"by": "dataset", "unknown": "error"},
        "aggregator": "token-mean",
        "kl": {"controller": {"name": "fixed", "coef": 0.0}},
        "rewards": [],
    }
