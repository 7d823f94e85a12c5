"""The PPO preset with a second clip where the advantage is negative."""

from __future__ import annotations

from posttrain.core.contracts import Algorithm, NoConfig


class PpoDualClip(Algorithm[NoConfig]):
    """PPO with min(clip loss, -3 A) where A < 0: a very unlikely bad token cannot dominate a step.

    All else is the `ppo` preset.
    Source: arXiv:1912.09729, eq. 5 (c = 3).
    """

    name = "ppo_dual_clip"
    Config = NoConfig

    def expand(self) -> dict[str, object]:
        """Fields of an `rl` stage."""
        return {
            "advantage": {"name": "gae", "lam": 0.95, "whiten": "tokens"},
            "policy_loss": {
                "name": "dual_clip",
                "clip_low": 0.2,
                "clip_high": 0.2,
                "dual_clip_c": 3.0,
            },
            "aggregator": "token-mean",
            "kl": {
                "estimator": "k1",
                "controller": {"name": "adaptive", "coef": 0.2, "target": 6.0, "horizon": 10000},
                "place": "reward",
            },
            "critic": {"clip": 0.2, "epochs": 4},
            "epochs": 4,
        }
