"""Reinforcement learning with a reward of one's own, and the rewards step by step.

python examples/own_reward.py [MODEL]
"""

import sys
from collections.abc import Sequence

import posttrain
from posttrain.core.contracts import NoConfig, Reward
from posttrain.core.types import RewardSample, Score


class Digits(Reward[NoConfig]):
    """R = the share of digits among the characters of the response."""

    name, Config = "digits_share", NoConfig
    runs_in = "host"  # it can neither hang nor crash; others are scored in worker processes

    def score(self, samples: Sequence[RewardSample]) -> list[Score]:
        """One score a sample, in order."""
        return [Score(sum(map(str.isdigit, s.text)) / max(1, len(s.text))) for s in samples]


run = posttrain.run(
    {
        "name": "own-reward",
        "model": sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct",
        "task": "digits",
        "evaluation": {"num_problems": 8, "max_response_length": 4},
        "stages": {
            "rl": {
                "kind": "rl",
                "inputs": {"model": "base"},
                "algorithm": "dr_grpo",
                "rewards": ["digits_share"],
                "steps": 5,
                "prompts_per_step": 4,
                "num_generations": 4,
                "generation": {"max_response_length": 4},
                "optimizer": {"learning_rate": 1.0e-3},
            }
        },
    },
    plugins=[Digits],
)
print(run.metrics("rl")[["reward/mean", "entropy/mean"]])
best = run.samples("rl").sort_values("reward").tail(3)
print(best[["step", "prompt", "response", "reward"]])
