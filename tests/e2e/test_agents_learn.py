"""A policy that learns from what a program asks it, which knows it as an API alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from posttrain.core.kit.tiny import make_tiny_model, make_tiny_tokenizer
from tests.helpers import live
from tests.helpers.pipeline import journal_lines, prepared, run_command, write_config

pytestmark = [pytest.mark.usefixtures("shared_prefect"), pytest.mark.slow]
STEPS = 60
PROGRAM = '''
"""Three questions for a digit, by the client of OpenAI; saying it first is right."""

import random

from posttrain.core.contracts import ModelEndpoint, NoConfig, Outcome, PlayedEnvironment
from posttrain.core.types import Problem


class Player(PlayedEnvironment[NoConfig]):
    """reward = right answers / 3. Source: own."""

    name = "player"
    Config = NoConfig

    async def start(self) -> None:
        from openai import AsyncOpenAI

        self.client = AsyncOpenAI(base_url="http://127.0.0.1:1", api_key="none")

    async def stop(self) -> None:
        await self.client.close()

    async def play(self, problem: Problem, endpoint: ModelEndpoint, seed: int) -> Outcome:
        client = self.client.with_options(base_url=endpoint.base_url, api_key=endpoint.key)
        rng, messages, right = random.Random(problem.key), [], 0
        for _ in range(3):
            digit = str(rng.randrange(4))
            messages.append({"role": "user", "content": digit})
            done = await client.chat.completions.create(
                model=endpoint.model, messages=messages, max_tokens=4
            )
            said = done.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": said})
            right += said[:1] == digit
        return Outcome(reward=right / 3)
'''


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_reward_of_a_program_s_episodes_rises(tmp_path: Path, seed: int) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.lstrip())
    tokenizer = make_tiny_tokenizer(live.CHARACTERS, live.TEMPLATE)
    make_tiny_model(tmp_path / "model", seed=seed, init_std=0.02, tokenizer=tokenizer)
    made = {
        "name": "player",
        "seed": seed,
        "engine": "transformers",
        "model": {"source": str(tmp_path / "model"), "dtype": "float32", "max_model_len": 48},
        "task": {"name": "episodes", "prompt": "3"},
        "evaluation": {"num_problems": 8, "max_response_length": 32, "num_samples": 0},
        "limits": {"num_threads": 1},
        "stages": {
            "rl": {
                "kind": "rl",
                "inputs": {"model": "base"},
                "algorithm": "grpo",
                "steps": STEPS,
                "prompts_per_step": 8,
                "num_generations": 8,
                "micro_batch_size": 64,
                "environment": {"name": str(tmp_path / "program.py") + ":Player"},
                "generation": {"max_response_length": 4},
                "rewards": ["environment"],
                "evaluate_every": 0,
                "optimizer": {"learning_rate": 3.0e-3},
            }
        },
    }
    home = prepared(tmp_path / "home")
    config = write_config(tmp_path / "run.yaml", made)
    done = run_command("run", str(config), "--home", str(home), "--json", timeout=1500)
    assert done.code == 0, done.text
    found = {each["step"]: each["metrics"] for each in map(json.loads, journal_lines(home, "rl"))}
    rewards = [found[step]["reward/mean"] for step in range(1, STEPS + 1)]
    first, last = (sum(part) / 5 for part in (rewards[:5], rewards[-5:]))
    print(f"seed {seed}: reward {first:.3f} in the first five steps, {last:.3f} in the last five")
    # A guess is right once in four at best, and the tiny model has five other tokens.
    assert last > first + 0.15, rewards
