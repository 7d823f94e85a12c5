"""The PPO preset with a second clip where the advantage is negative."""

from __future__ import annotations

from posttrain.plugins.algorithms.ppo import Ppo


class PpoDualClip(Ppo):
    """PPO with min(clip loss, -3 A) where A < 0: a very unlikely bad token cannot dominate a step.

    All else is the `ppo` preset.
    Source: arXiv:1912.09729, eq. 5 (c = 3).
    """

    name = "ppo_dual_clip"
    fields = {
        **Ppo.fields,
        "policy_loss": {
            "name": "dual_clip",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "dual_clip_c": 3.0,
        },
    }
