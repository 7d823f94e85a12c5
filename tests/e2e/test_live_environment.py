"""Training in an environment that answers otherwise each time, and fails now and then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.core.kit.tiny import make_tiny_model, make_tiny_tokenizer
from tests.helpers import live
from tests.helpers.killer import WHERE, install
from tests.helpers.pipeline import journal_lines, prepared, run_command, write_config

pytestmark = pytest.mark.usefixtures("shared_prefect")
STEPS = 5
UNREPEATABLE = '''

class Whims(DigitGame):
    """As `DigitGame`, and asks for other digits each time; one in eight episodes breaks."""

    name = "whims"
    deterministic = False

    async def reset(self, problem: Problem, seed: int) -> Opening:
        opening = await super().reset(problem, seed)
        assert isinstance(opening.state, Game)
        rng = random.SystemRandom()
        opening.state.digits = [rng.randrange(4) for _ in opening.state.digits]
        if rng.random() < 0.125:
            opening.state.problem = "crash"
        shown = (Message("user", str(opening.state.digits[0])),)
        return Opening(opening.state, messages=shown)
'''


PROGRAM = '''
"""A program that knows the policy as an API alone, and asks it for digits, others each time."""

import random

from posttrain.core.contracts import ModelEndpoint, NoConfig, Outcome, PlayedEnvironment
from posttrain.core.types import Problem


class Player(PlayedEnvironment[NoConfig]):
    """Three questions, and a helper that is asked one of its own; one in eight plays breaks."""

    name = "player"
    Config = NoConfig

    async def start(self) -> None:
        from openai import AsyncOpenAI

        self.client = AsyncOpenAI(base_url="http://127.0.0.1:1", api_key="none")

    async def stop(self) -> None:
        await self.client.close()

    async def play(self, problem: Problem, endpoint: ModelEndpoint, seed: int) -> Outcome:
        client = self.client.with_options(base_url=endpoint.base_url, api_key=endpoint.key)
        rng = random.SystemRandom()
        messages, right = [], 0
        for _ in range(3):
            digit = str(rng.randrange(4))
            messages.append({"role": "user", "content": digit})
            done = await client.chat.completions.create(
                model=endpoint.model, messages=messages, max_tokens=6
            )
            if rng.random() < 0.04:
                raise RuntimeError("the program broke")
            said = done.choices[0].message
            messages.append({"role": "assistant", "content": said.content})
            right += (said.content or "")[:1] == digit
        await client.chat.completions.create(
            model=endpoint.model, messages=[{"role": "user", "content": "0"}], max_tokens=4
        )
        return Outcome(reward=right / 3)
'''


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("game")
    (folder / "game.py").write_text(Path(live.__file__).read_text() + UNREPEATABLE)
    (folder / "program.py").write_text(PROGRAM.lstrip())
    tokenizer = make_tiny_tokenizer(live.CHARACTERS, live.TEMPLATE)
    make_tiny_model(folder / "model", seed=1, init_std=0.02, tokenizer=tokenizer)
    return folder


def config_of(project: Path, environment: dict[str, Any] | None, **rl: Any) -> Path:
    """A run of an RL stage and an evaluation in the same environment."""
    placed = {} if environment is None else {"environment": environment}
    made = {
        "name": "game",
        "engine": "transformers",
        "model": {"source": str(project / "model"), "dtype": "float32", "max_model_len": 64},
        "task": {"name": "episodes", "prompt": "3"},
        "evaluation": {"num_problems": 8, "max_response_length": 32, "num_samples": 2},
        "limits": {"num_threads": 1},
        "stages": {
            "rl": {
                "kind": "rl",
                "inputs": {"model": "base"},
                "algorithm": "grpo",
                "steps": STEPS,
                "prompts_per_step": 4,
                "num_generations": 4,
                "micro_batch_size": 16,
                "generation": {"max_response_length": 32},
                "rewards": ["environment"],
                "evaluate_every": 5,
                "checkpoint_every": 2,
                "optimizer": {"learning_rate": 1.0e-3},
                **placed,
                **rl,
            },
            "evaluate": {"kind": "evaluate", "inputs": {"model": "rl"}, **placed},
        },
    }
    return write_config(project / f"run-{len(list(project.glob('run-*')))}.yaml", made)


@pytest.mark.parametrize(
    "environment",
    [
        pytest.param({"name": "game.py:Whims", "max_turns": 4}, id="game"),
        pytest.param(
            {"name": "program.py:Player", "max_calls": 8}, id="program", marks=pytest.mark.slow
        ),
    ],
)
def test_a_killed_run_learns_from_the_episodes_that_it_had_and_replays(
    project: Path, tmp_path: Path, environment: dict[str, Any]
) -> None:
    config = config_of(project, {**environment, "name": str(project / environment["name"])})
    home = prepared(tmp_path / "home")
    where = ("run", str(config), "--home", str(home), "--json")
    path = install(tmp_path / "killer")
    killed = run_command(*where, variables={"PYTHONPATH": path, WHERE: "rl:3"})
    assert killed.code == -9, killed.text
    before = {
        each["step"]: each for each in map(json.loads, journal_lines(home, "rl")) if each["step"]
    }
    assert 3 in before
    done = run_command(*where)
    assert done.code == 0, done.text
    assert done.result["stages"]["rl"]["status"] == "resumed"
    again = {each["step"]: each for each in map(json.loads, journal_lines(home, "rl"))}
    first, second = (found[3]["metrics"] for found in (before, again))
    for name in ("reward/mean", "tokens/response", "tools/turns", "adv/max_abs"):
        assert first[name] == second[name], f"{name}: other episodes after the kill"
    run = str(done.result["run_id"])
    replayed = run_command("replay", run, "--step", str(STEPS), "--home", str(home), "--json")
    assert replayed.code == 0, replayed.text
    steps = replayed.result["steps"]
    assert [each["step"] for each in steps] == list(range(1, STEPS + 1))
    assert not any(each["differences"] for each in steps), replayed.text
    failed = [line for line in done.text.splitlines() if "episodes failed" in line]
    assert failed, "one in eight episodes breaks, and the log says so"
    if environment["name"].startswith("program"):
        branches = [each["metrics"].get("env/branches", 0.0) for each in again.values()]
        assert max(branches) > 1.5, "the helper's question is a branch of its own"


@pytest.mark.parametrize(
    ("environment", "changes", "words"),
    [
        (None, {}, "are judged by an environment, and the stage has none"),
        ("game", {"sampler": "arpo_tree"}, "holds its states itself; set sampler: group"),
        (
            {"name": "tools", "step_s": 5.0},
            {},
            "environment: step_s would change nothing",
        ),
    ],
)
def test_what_cannot_be_combined_is_one_sentence(
    project: Path, environment: dict[str, Any] | str | None, changes: dict[str, Any], words: str
) -> None:
    if environment == "game":
        environment = {"name": f"{project / 'game.py'}:DigitGame"}
    assert not isinstance(environment, str)
    config = config_of(project, environment, **changes)
    done = run_command("validate", str(config), "--home", str(project / "unused"))
    assert done.code == 2 and "Traceback" not in done.text
    assert words in " ".join(done.text.split())
