"""RL through the real command in an environment that rewards each turn.

A digit is shown, and the answer is to write it again. A right answer earns a reward and brings the
next digit; after a wrong one the same digit is shown again, so that episodes of a group come to the
same states. An episode has four turns of one token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from posttrain.core.kit.tiny import BARE_TEMPLATE, make_tiny_model, make_tiny_tokenizer
from tests.helpers.learning import SEEDS, final, run

pytestmark = pytest.mark.usefixtures("shared_prefect")

TURNS = 4
DIGITS = "0123456789"
ENVIRONMENT = f'''"""Write the digit that is shown."""

from posttrain.core.contracts import Environment, NoConfig, Observation, Opening, Turn
from posttrain.core.types import Problem


class Copying(Environment[NoConfig]):
    """reward = 1 / {TURNS} for each turn that writes the digit shown. Source: a test."""

    name = "copying"
    Config = NoConfig
    gives_rewards = True

    def stop_strings(self) -> tuple[str, ...]:
        """A turn is one token."""
        return tuple("\\n{DIGITS}")

    def reset(self, problem: Problem) -> Opening:
        """The first digit and the number of turns so far."""
        first = int(problem.metadata["seed"]) % 10
        return Opening((first, 0), suffix=str(first))

    def step(self, state: object, turn: Turn) -> Observation:
        """The next digit after a right answer, else the same again."""
        digit, number = state
        right = turn.text == str(digit)
        digit = (7 * digit + 3) % 10 if right else digit
        over = number + 1 == {TURNS}
        return Observation(f"\\n{{digit}}", over, (digit, number + 1), reward=right / {TURNS})
'''


def turns_config(folder: Path, seed: int, algorithm: str, **rl: Any) -> dict[str, Any]:
    """One rl stage from random weights, and what it earns on episodes that it never saw."""
    (folder / "copying.py").write_text(ENVIRONMENT)
    tokenizer = make_tiny_tokenizer(f"\n{DIGITS}", BARE_TEMPLATE)
    model = make_tiny_model(
        folder / "model", seed=seed, layers=1, kv_heads=2, init_std=0.05, tokenizer=tokenizer
    )
    environment = {"name": "copying.py:Copying", "max_turns": TURNS}
    return {
        "name": "turns",
        "seed": seed,
        "engine": "transformers",
        "model": {"source": str(model), "dtype": "float32", "max_model_len": 24},
        "task": {"name": "episodes", "prompt": "\n", "count": 1000},
        "evaluation": {"num_problems": 20, "max_response_length": 16, "num_samples": 0},
        "limits": {"num_threads": 1},
        "stages": {
            "rl": {
                "kind": "rl",
                "inputs": {"model": "base"},
                "algorithm": algorithm,
                "environment": environment,
                "rewards": ["environment"],
                "prompts_per_step": 16,
                "num_generations": 8,
                "micro_batch_size": 128,
                "generation": {"max_response_length": 16},
                "evaluate_every": 0,
                "kl": {"controller": {"name": "fixed", "coef": 0.0}},
                "optimizer": {"learning_rate": 5.0e-3},
                **rl,
            },
            "after": {
                "kind": "evaluate",
                "inputs": {"model": "rl"},
                "environment": environment,
            },
        },
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("algorithm", ["gigpo", "turn_grpo"])
def test_credit_for_turns_learns(tmp_path: Path, algorithm: str, seed: int) -> None:
    learned = run(tmp_path, turns_config(tmp_path, seed, algorithm, steps=40))
    rewards = learned.history("rl", "reward/mean")
    assert len(rewards) == 40 and rewards[0] < 0.25
    assert final(rewards) > 0.9
    assert max(learned.history("rl", "adv/turn_groups")) > 16 * 2
    assert learned.metric("after", "eval/greedy_accuracy") > 0.9


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", SEEDS)
def test_replayed_groups_and_observations_do_not_keep_it_from_learning(
    tmp_path: Path, seed: int
) -> None:
    extra = {
        "sampler": {"name": "replay", "share": 0.25, "max_lag": 2},
        "policy_loss": ["ppo_clip", {"name": "echo", "alpha": 0.3}],
    }
    learned = run(tmp_path, turns_config(tmp_path, seed, "gigpo", steps=50, **extra))
    assert final(learned.history("rl", "reward/mean")) > 0.85
    assert max(learned.history("rl", "staleness/max")) == 2
    nll = learned.history("rl", "observed/nll")
    assert final(nll) < nll[0], "the environment's answers are learned too"


def test_two_steps_with_everything_that_reads_turns(tmp_path: Path) -> None:
    extra = {"sampler": "curriculum", "policy_loss": ["ppo_clip", "echo"], "steps": 2}
    config = turns_config(tmp_path, 0, "gigpo", **extra)
    config["task"]["count"] = 40
    del config["stages"]["after"]
    learned = run(tmp_path, config)
    for name in ("adv/turn_groups", "loss/term/echo", "observed/nll", "curriculum/unseen_frac"):
        values = learned.history("rl", name)
        assert len(values) == 2 and values[0] > 0, name
    assert learned.history("rl", "curriculum/pass_rate/unseen")
