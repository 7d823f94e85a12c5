"""The preset of on-policy distillation: a teacher judges every token that the policy samples."""

from __future__ import annotations

from posttrain.core.contracts import Algorithm, NoConfig


class Opd(Algorithm[NoConfig]):
    """A_t = log p_T(y_t) - log p_old(y_t), clipped token loss over all tokens; no reward, no KL.

    The stage needs a teacher: `inputs: {teacher: <stage>}` or `teachers`. With `advantage: grpo`
    and rewards the teacher's part is added to theirs. One response per prompt is enough.
    Source: Thinking Machines, "On-policy distillation" (2025); arXiv:2306.13649.
    """

    name = "opd"
    Config = NoConfig
    fields = {
        "advantage": "zero",
        "advantage_transform": {"name": "opd", "coef": 1.0, "gamma": 0.0},
        "policy_loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
        "aggregator": "token-mean",
        "kl": {"controller": {"name": "fixed", "coef": 0.0}},
        "rewards": [],
    }
