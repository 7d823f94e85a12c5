"""A task whose answers differ in length, for a tiny random model through the real command.

The prompt is a digit d, the answer that digit 1 + d mod 4 times. The model has to learn what to say
and when to stop; at random its answers are of one to six tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.helpers.learning import make_model

LONGEST = 6
TASK = '''"""Say a digit as often as it says."""

from posttrain.core.contracts import NoConfig, Task
from posttrain.core.types import Problem, Verdict


class Lengths(Task[NoConfig]):
    """The answer to d is d, 1 + d mod 4 times. Source: a test."""

    name = "lengths"
    Config = NoConfig

    def problems(self, split, count, seed):
        """Nine digits; the tenth is held out."""
        digits = [9] if split == "held_out" else list(range(9))
        answers = [f"{d}" * (1 + d % 4) for d in digits]
        return [Problem(f"{d}", f"{d}", a, a) for d, a in zip(digits, answers)][:count]

    def available(self, split):
        """How many digits."""
        return 1 if split == "held_out" else 9

    def verify(self, problem, text):
        """The share of places with the right digit; a place too many is a wrong one."""
        right = sum(a == b for a, b in zip(text, problem.answer))
        return Verdict(right / max(len(problem.answer), len(text)), text or None)
'''


def length_config(
    folder: Path, seed: int, stages: Mapping[str, Mapping[str, Any]], model: Path | None = None
) -> dict[str, Any]:
    """A run with one rl stage per entry of `stages`, each from the same weights."""
    (folder / "lengths.py").write_text(TASK)
    common = {
        "kind": "rl",
        "inputs": {"model": "base"},
        "algorithm": "reinforce",
        "advantage": "rloo",
        "steps": 40,
        "prompts_per_step": 9,
        "num_generations": 8,
        "micro_batch_size": 128,
        "generation": {"max_response_length": LONGEST},
        "evaluate_every": 0,
        "check_sync": "first",
        "optimizer": {"learning_rate": 5.0e-3},
    }
    return {
        "name": "lengths",
        "seed": seed,
        "engine": "transformers",
        "model": {
            "source": str(model or make_model(folder, seed)),
            "dtype": "float32",
            "max_model_len": 16,
        },
        "task": "lengths.py:Lengths",
        "evaluation": {"num_problems": 1, "max_response_length": LONGEST, "num_samples": 0},
        "limits": {"num_threads": 1},
        "stages": {name: {**common, **fields} for name, fields in stages.items()},
    }
