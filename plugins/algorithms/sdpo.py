"""The preset of self-distillation from successes: a group's right answer teaches its siblings."""

from __future__ import annotations

from pydantic import Field

from posttrain.core.contracts import Algorithm, PluginConfig

TEMPLATE = "{prompt}\n\nCorrect solution:\n\n{context}\n\nCorrectly solve the original question.\n"


class SdpoConfig(PluginConfig):
    """Settings of `sdpo`."""

    weight: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="share w of self-distillation; the rest is GRPO's loss on all responses",
    )


class Sdpo(Algorithm[SdpoConfig]):
    """L = w (1 / N_seq) sum_i (1 / n_i) sum_t min(r_it, 2) sg(log p - log p_T) log p + (1 - w)
    L_GRPO, p_T = p_ema(y_t | question and a sibling's success, y_<t), over rows with such a
    sibling.

    r = p / p_old is held constant; the policy that teaches is a moving average (rate 0.05) which
    reads the first other response of the group with a reward of at least 1. Groups of 2 or more.
    Source: arXiv:2601.20802, with the settings of TRL but for N_seq, the rows with a teacher: TRL
    divides by all, as `aggregator: {name: seq-mean-token-mean, count_empty_seqs: true}` does.
    """

    name = "sdpo"
    Config = SdpoConfig

    def expand(self) -> dict[str, object]:
        """Fields of an `rl` stage."""
        weight = self.config.weight
        rest: dict[str, object] = {"advantage": "zero", "policy_loss": None}
        if weight < 1:
            clip = {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2, "coef": 1 - weight}
            rest = {"advantage": "grpo", "policy_loss": clip}
        own = {"weights": "ema", "ema_rate": 0.05, "context": "sibling", "template": TEMPLATE}
        return {
            **rest,
            "distillation": {
                "name": "gkd",
                "divergence": "reverse",
                "support": "sampled",
                "ratio_cap": 2.0,
                "coef": weight,
            },
            "teachers": {"self": {"policy": own}},
            "aggregator": "seq-mean-token-mean",
            "kl": {"controller": {"name": "fixed", "coef": 0.0}},
            "rewards": ["accuracy"],
        }
