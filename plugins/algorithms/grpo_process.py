"""The GRPO preset with process supervision: rewards of steps, not of answers."""

from __future__ import annotations

from posttrain.core.contracts import Algorithm, NoConfig
from posttrain.core.hooks import hookimpl


class GrpoProcess(Algorithm[NoConfig]):
    """GRPO's loss with A_it = sum of the z-scores of the steps that end at or after token t.

    Needs a reward that scores steps (a process reward model, or a verifier of steps).
    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.3.
    """

    name = "grpo_process"
    Config = NoConfig

    def expand(self) -> dict[str, object]:
        """Fields of an `rl` stage."""
        return {
            "advantage": "grpo_process",
            "policy_loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
            "aggregator": "seq-mean-token-mean",
            "kl": {
                "estimator": "k3",
                "controller": {"name": "fixed", "coef": 0.04},
                "place": "loss",
            },
        }


@hookimpl
def posttrain_register() -> list[type[GrpoProcess]]:
    """Offer this plugin."""
    return [GrpoProcess]
