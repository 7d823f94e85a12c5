"""`posttrain env check`: sound environments pass, and each planted fault is found and named."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from posttrain.core.sandbox.runner import levels_available
from posttrain.pipelines.cli.main import app
from tests.helpers.games import game_model
from tests.helpers.plugins import TERMINAL_TASKS

SOUND = '''"""A game for tests."""
import asyncio
import time
from dataclasses import dataclass

from posttrain.core.contracts import (
    Environment, LiveEnvironment, NoConfig, Observation, Opening, Turn
)
from posttrain.core.types import Message, Problem

made = 0


@dataclass
class State:
    wanted: str
    turns: int = 0


class Game(LiveEnvironment[NoConfig]):
    """R = 1 for the word that was shown. Source: a test."""

    name = "game"
    Config = NoConfig
    deterministic = True

    async def reset(self, problem: Problem, seed: int) -> Opening:
        global made
        made += 1
        word = ("left", "right")[int(problem.metadata["seed"]) % 2]
        return Opening(State(word), suffix=f" Say {word}.")

    async def step(self, state: object, turn: Turn) -> Observation:
        await asyncio.sleep(0)
        state.turns += 1
        right = turn.text.strip() == state.wanted
        shown = (Message("user", f"turn {state.turns}"),)
        return Observation("", right, state, {}, shown, reward=float(right))


class Value(Environment[NoConfig]):
    """observation = the number of turns. Source: a test."""

    name = "value"
    Config = NoConfig

    def reset(self, problem: Problem) -> Opening:
        return Opening([0], suffix=" Count.")

    def step(self, state: object, turn: Turn) -> Observation:
        return Observation("", state[0] > 3, [state[0] + 1], {}, (Message("user", str(state)),))
'''


def checked(*arguments: str, code: int = 0) -> dict[str, tuple[str, str]]:
    result = CliRunner().invoke(app, ["env", "check", *arguments, "--json"])
    assert result.exit_code == code, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    return {each["check"]: (each["state"], each["detail"]) for each in found["checks"]}


def written(folder: Path, old: str = "", new: str = "") -> Path:
    assert old in SOUND
    file = folder / "game.py"
    file.write_text(SOUND.replace(old, new) if old else SOUND)
    return file


def test_sound_environments_pass(tmp_path: Path) -> None:
    file = written(tmp_path)
    live = checked(f"{file}:Game")
    assert {state for state, _ in live.values()} == {"passed", "skipped"}
    skipped = [name for name, (state, _) in live.items() if state == "skipped"]
    assert skipped == ["a state can be gone on from again", "the known solution scores 1"]
    assert live["a step that is cut off harms nobody"][1].startswith("cancelled, closed")
    value = checked(f"{file}:Value")
    assert value["a state can be gone on from again"] == ("passed", "5 steps made again")
    assert (
        "as the template writes"
        in value["tokens before an observation stay as they were sampled"][1]
    )


STEP = "        await asyncio.sleep(0)\n"
FAULTS = [
    ("Game", 'f"turn {state.turns}"', 'f"turn {made}"', "equal seeds", "turn 1 of problem"),
    ("Game", "await asyncio.sleep(0)", "time.sleep(3)", "episodes begin", "blocks the event loop"),
    ("Game", "await asyncio.sleep(0)", "await asyncio.sleep(99)", "episodes begin", "more than 1"),
    (
        "Game",
        STEP,
        "        try:\n            await asyncio.sleep(99)\n"
        "        except asyncio.CancelledError:\n            await asyncio.sleep(99)\n",
        "episodes begin",
        "goes on when it is cancelled",
    ),
    ("Game", "reward=float(right)", "reward=1.0", "attack: empty", "rewards 8, 8, 8"),
    (
        "Game",
        "float(right)",
        'float("Say" in turn.text)',
        "attack: the prompt",
        "repeating the prompt gets the rewards",
    ),
    (
        "Game",
        "float(right)",
        'float("yes yes" in turn.text)',
        "attack: one word",
        "a word again and again gets",
    ),
    ("Game", " Say {word}.", " Say {problem.answer}.", "attack: the answer", "shows the answer"),
    (
        "Game",
        "        state.turns += 1\n",
        "        state.turns += 1\n        assert Game.open < 9, 'too many'\n",
        "many episodes at once",
        "too many",
    ),
    ("Game", "await asyncio.sleep(0)", "1 / len(turn.text)", "attack: empty", "ZeroDivisionError"),
    ("Game", "right, state, {}", "right, state, {'n': float('nan')}", "episodes begin", "finite"),
    ("Value", "[state[0] + 1]", "state", "a state can", ""),
    (
        "Value",
        "return Observation(",
        "state[0] += 1; return Observation(",
        "a state can be gone on",
        "changes the state it began from",
    ),
    (
        "Value",
        '    name = "value"\n',
        '    name = "value"\n    reads_special_tokens = True\n',
        "special tokens",
        "reads_special_tokens = False",
    ),
]


@pytest.mark.parametrize(("cls", "old", "new", "check", "says"), FAULTS)
def test_a_planted_fault_is_found(
    tmp_path: Path, cls: str, old: str, new: str, check: str, says: str
) -> None:
    text = SOUND
    assert old in text
    text = text.replace(old, new)
    if "Game.open" in new:  # a game that counts its episodes
        text = text.replace("        made += 1\n", "        made += 1\n        Game.open += 1\n")
        text = text.replace("deterministic = True", "deterministic = True\n    open = 0")
        text += "\n\nasync def close(self, state):\n    Game.open -= 1\n\n\nGame.close = close\n"
        text = text.replace("await asyncio.sleep(0)", "await asyncio.sleep(0.05)")
    if "reads_special_tokens" in new:  # which concerns texts in the model's own turn
        text = text.replace('{}, (Message("user", str(state)),))', "{})").replace(
            'Observation("", state', "Observation(str(state), state"
        )
    if new == "state":
        text = text.replace("state[0] > 3", "False")
        checked(f"{put(tmp_path, text)}:{cls}", "--limit", "1")  # goes on for ever: no fault
        return
    found = checked(f"{put(tmp_path, text)}:{cls}", "--limit", "1", code=1)
    failed = {name: detail for name, (state, detail) in found.items() if state == "failed"}
    assert any(check in name and says in detail for name, detail in failed.items()), found


def put(folder: Path, text: str) -> Path:
    file = folder / "game.py"
    file.write_text(text)
    return file


def test_the_environment_of_a_config_with_its_task_and_model(tmp_path: Path) -> None:
    from posttrain.core.kit.tiny import make_tiny_bpe_tokenizer, make_tiny_model

    make_tiny_model(tmp_path / "model", tokenizer=make_tiny_bpe_tokenizer())
    config = tmp_path / "lake.yaml"
    config.write_text(
        f"""
model: {{source: {tmp_path / "model"}}}
task: episodes
stages:
  rl:
    kind: rl
    steps: 1
    inputs: {{model: base}}
    rewards: [environment]
    environment:
      name: gymnasium
      id: FrozenLake-v1
      kwargs: {{is_slippery: false}}
      action_names: [left, down, right, up]
"""
    )
    turns = [word for name in ("right", "left", "right") for word in ("--turn", name)]
    found = checked(str(config), "--at-once", "4", *turns)
    assert "0 of 9 calls or actions failed" in found["episodes begin, answer and are closed"][1]
    assert found["attack: empty answers"] == ("passed", "rewards 0, 0, 0")
    assert found["many episodes at once"][1].startswith("4 episodes in ")
    over = checked(str(config), "--set", "stages.rl.environment.action_names=[]", "--at-once", "1")
    assert over["it stops"][0] == "passed"


PLAYED = '''"""A program for tests."""
from openai import AsyncOpenAI

from posttrain.core.contracts import (
    ModelEndpoint, NoConfig, Outcome, PlayedEnvironment
)
from posttrain.core.types import Problem


class Program(PlayedEnvironment[NoConfig]):
    """R = 1 for the answer 2. Source: a test."""

    name = "program"
    Config = NoConfig

    async def play(self, problem: Problem, endpoint: ModelEndpoint, seed: int) -> Outcome:
        messages = [{"role": "user", "content": problem.prompt}]
        async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.key) as client:
            for _ in range(2):
                made = await client.chat.completions.create(model="policy", messages=messages)
                messages.append(made.choices[0].message.model_dump(exclude_none=True))
                messages.append({"role": "user", "content": "Again."})
        return Outcome(float(messages[-2]["content"] == "2"))
'''


def test_what_a_program_plays_is_played_with_given_texts(tmp_path: Path) -> None:
    where = f"{put(tmp_path, PLAYED)}:Program"
    found = checked(where, "--turn", "1", "--turn", "2", "--at-once", "5")
    assert {state for state, _ in found.values()} == {"passed"}
    played = "3 episodes, 6 requests, 3 rows; rewards 1, 1, 1"
    assert found["episodes are played to their end"][1] == played
    assert found["attack: empty answers"][1] == "rewards 0, 0, 0"
    assert found["many episodes at once"][1].startswith("5 episodes in ")


def test_a_program_that_pays_for_nothing_or_asks_nothing_is_found_out(tmp_path: Path) -> None:
    paying = PLAYED.replace('float(messages[-2]["content"] == "2")', "0.5")
    found = checked(f"{put(tmp_path, paying)}:Program", "--at-once", "1", code=1)
    assert found["attack: empty answers"] == (
        "failed",
        "saying nothing gets the rewards 0.5, 0.5, 0.5",
    )
    silent = PLAYED.replace("range(2)", "range(0)").replace("messages[-2]", "messages[-1]")
    found = checked(f"{put(tmp_path, silent)}:Program", code=1)
    state, said = found["episodes are played to their end"]
    assert state == "failed" and "the program never asked the policy" in said
    assert found["many episodes at once"][0] == "skipped"


def test_a_program_passes_the_checks_of_the_contract(tmp_path: Path) -> None:
    put(tmp_path, PLAYED)
    result = CliRunner().invoke(app, ["plugins", "check", f"{tmp_path}/game.py:Program", "--json"])
    assert result.exit_code == 0, result.output
    checks = json.loads(result.stdout.splitlines()[-1])["plugins"][0]["checks"]
    assert {each["state"] for each in checks} == {"passed", "skipped"}


def test_a_live_environment_keeps_its_contract_or_is_found_out(tmp_path: Path) -> None:
    bare = SOUND.replace('Opening(State(word), suffix=f" Say {word}.")', "State(word)")
    for text, code in ((SOUND, 0), (bare, 1)):
        file = put(tmp_path, text.replace('int(problem.metadata["seed"])', "len(problem.key)"))
        result = CliRunner().invoke(app, ["plugins", "check", f"{file}:Game"])
        assert result.exit_code == code, result.output


def test_tools_over_mcp() -> None:
    server = Path(__file__).resolve().parents[1] / "helpers" / "mcp_server.py"
    fields = [f"servers=[{{command: [{sys.executable}, {server}]}}]", "allow=[add, inject]"]
    given = [word for value in [*fields, "session=run"] for word in ("--set", value)]
    found = checked("mcp", *given, "--at-once", "4")
    assert {state for state, _ in found.values()} == {"passed", "skipped"}
    assert "0 of 6 calls or actions failed" in found["episodes begin, answer and are closed"][1]


@pytest.mark.skipif(
    not set(levels_available()) - {"rlimits"}, reason="no sandbox here has folders of its own"
)
@pytest.mark.slow
def test_task_folders_whose_solution_is_wrong_or_not_needed_are_found(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    for name in ("hello", "fix-script"):
        shutil.copytree(TERMINAL_TASKS / name, tasks / name)
    given = ("--task", f"terminal,path={tasks}", "--at-once", "2", "--problems", "9")
    given = (*given, "--turn", "x", "--max-turns", "1")
    found = checked("terminal", *given)
    assert {state for state, _ in found.values()} == {"passed", "skipped"}, found
    assert found["the known solution scores 1"] == ("passed", "1 solutions")
    assert found["attack: empty answers"][1] == "rewards 0"
    for task in tasks.iterdir():
        (task / "tests" / "test.sh").write_text("echo 0.5 > /logs/verifier/reward.txt\n")
    found = checked("terminal", *given, code=1)
    state, why = found["the known solution scores 1"]
    assert state == "failed" and why.endswith("scores 0.5, not 1")
    wanted = ("failed", "saying nothing gets the rewards 0.5")
    assert found["attack: empty answers"] == wanted


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["gymnasium", "--set", "id=Pong"], 2, "Pong"),
        (["gymnasiu"], 2, "did you mean 'gymnasium'"),
        (["grpo"], 2, "no environment or package named 'grpo'"),
        (["openenv", "--set", "url=http://127.0.0.1:9"], 4, "start the server"),
        (["quickstart"], 2, "no stage has an environment"),
        (["gymnasium", "--stage", "rl"], 2, "leave --stage out"),
    ],
)
def test_what_cannot_be_checked_is_one_sentence(arguments: list[str], code: int, says: str) -> None:
    result = CliRunner().invoke(app, ["env", "check", *arguments])
    assert result.exit_code == code, result.output
    assert says in " ".join(result.output.split()) and "Traceback" not in result.output


def test_the_help_says_what_can_be_named() -> None:
    shown: Any = CliRunner().invoke(app, ["env", "check", "--help"])
    assert shown.exit_code == 0 and "FILE.py:CLASS" in shown.output


def test_a_small_vocabulary_is_not_taken_for_an_injection(tmp_path: Path) -> None:
    """Its tokenizer writes letters as the token for unknown ones, which is a special token."""
    model = game_model(tmp_path / "model")
    found = checked(f"{put(tmp_path, SOUND)}:Game", "--tokenizer", str(model), "--limit", "1")
    assert found["special tokens in an observation are text"][0] == "passed", found


def test_a_start_that_blocks_is_one_sentence(tmp_path: Path) -> None:
    start = "\n    async def start(self) -> None:\n        time.sleep(3)\n"
    old = "    deterministic = True\n"
    text = SOUND.replace(old, old + start)
    result = CliRunner().invoke(
        app, ["env", "check", f"{put(tmp_path, text)}:Game", "--limit", "0.5", "--json"]
    )
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit), result.exception
    assert "environment 'game' does not start: it blocks the event loop" in result.output
    assert "game.py" in result.output and "to_thread" in result.output
