"""The PPO-ptx preset: PPO with a pre-training term in every step."""

from __future__ import annotations

from posttrain.plugins.algorithms.ppo import Ppo


class PpoPtx(Ppo):
    """L = PPO's loss + 27.8 * NLL of pre-training examples, each divided by its own token count.

    KL in the reward with a fixed coefficient of 0.02. `ptx.path` names the pre-training texts; by
    default the task's worked answers stand for them.
    Source: InstructGPT, arXiv:2203.02155, eq. 2 and appendix C.4.
    """

    name = "ppo_ptx"
    fields = {
        **Ppo.fields,
        "policy_loss": [
            {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
            {"name": "ptx", "coef": 27.8, "aggregator": "token-mean"},
        ],
        "kl": {
            "estimator": "k1",
            "controller": {"name": "fixed", "coef": 0.02},
            "place": "reward",
        },
    }
