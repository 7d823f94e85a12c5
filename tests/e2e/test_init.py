"""A fresh folder, 60 rows of one's own: the commands that make, use and extend a model."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from posttrain.core.kit.tiny import make_tiny_model
from tests.helpers.pipeline import COMMAND, environment, run_command

pytestmark = pytest.mark.usefixtures("shared_prefect")

REWARD = '''
from posttrain.core.contracts import NoConfig, Reward
from posttrain.core.types import Score


class Brief(Reward[NoConfig]):
    """R = 1 for an answer of at most 20 characters, else 0."""

    name, Config = "brief", NoConfig

    def score(self, samples):
        return [Score(float(len(sample.text) <= 20)) for sample in samples]
'''
ANSWERS = "tiny\nown.jsonl\nsft+rl\naccuracy\nshort\n"


def typed(*words: str, stdin: str = "") -> str:
    """What `posttrain WORDS` prints to stdout; fails unless it exits with 0."""
    if not stdin:
        found = run_command(*words)
        assert found.code == 0, f"{words}:\n{found.text}"
        return found.out
    done = subprocess.run(
        [*COMMAND, *words],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=200,
        env=environment(),
    )
    assert done.returncode == 0, f"{words}:\n{done.stdout}{done.stderr}"
    return done.stdout


def result(*words: str) -> dict[str, Any]:
    """The JSON object that ends the output of a command."""
    found: dict[str, Any] = json.loads(typed(*words, "--json").splitlines()[-1])
    return found


def test_sixty_rows_of_ones_own_become_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_tiny_model(tmp_path / "tiny")
    rows = [{"prompt": f"Say {n}.", "completion": f"{n}!"} for n in range(60)]
    Path("own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    typed("init", "--model", "tiny", "--yes")
    typed("validate", "posttrain.yaml")
    assert result("run", "posttrain.yaml")["stages"]["sft"]["status"] == "ran"
    assert (tmp_path / ".posttrain").is_dir()


@pytest.mark.slow
def test_a_teacher_makes_it_distillation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_tiny_model(tmp_path / "small")
    make_tiny_model(tmp_path / "large", seed=1)
    rows = [{"prompt": f"{n},", "answer": str(n + 1)} for n in range(60)]
    Path("own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chosen = ("--model", "small", "--data", "own.jsonl", "--yes")
    assert result("init", *chosen, "--teacher", "large")["method"] == "distill"
    ran = result("run", "posttrain.yaml", "--set", "stages.distill.steps=2")
    assert {name: stage["status"] for name, stage in ran["stages"].items()} == {
        name: "ran" for name in ("evaluate_base", "distill", "evaluate", "register")
    }
    for words, said in (
        (("--teacher", "nowhere"), "'nowhere' has no config.json"),
        (("--method", "distill"), "needs the folder of a larger model"),
        (("--method", "rl", "--teacher", "large"), "--teacher goes with method distill"),
        (("--teacher", "large", "--reward", "accuracy"), "--reward goes with method rl or sft+rl"),
    ):
        refused = subprocess.run(
            [*COMMAND, "init", "other", *chosen, *words],
            capture_output=True,
            text=True,
            timeout=200,
            env=environment(),
        )
        assert refused.returncode == 2 and said in refused.stderr, refused.stderr
    assert not Path("other").exists(), "nothing is written"


@pytest.mark.slow
def test_from_sixty_rows_to_an_extended_run_by_commands_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_tiny_model(tmp_path / "tiny")
    rows = [{"prompt": f"{n},", "answer": str(n + 1)} for n in range(60)]
    Path("own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    typed("init", stdin=ANSWERS)
    typed("validate", "posttrain.yaml")
    smaller = ("--set", "stages.rl.steps=2", "--set", "stages.sft.steps=4")
    first = result("run", "posttrain.yaml", *smaller)
    assert {stage["status"] for stage in first["stages"].values()} == {"ran"}
    run = first["run_id"]

    said = typed("chat", run, "--compare", "base", "--max-tokens", "6", stdin="1,\n7,\n")
    assert said.count(f"[{run[:8]}/rl]") == said.count("[base]") == 2
    typed("export", run, "exported")
    AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    typed("eval", run, "--suite", "held_out")

    Path("my_rewards.py").write_text(REWARD)
    typed("plugins", "check", "my_rewards.py:Brief")
    config = Path("posttrain.yaml").read_text()
    added = config.replace("- {name: accuracy}", "- {name: accuracy}\n      - my_rewards.py:Brief")
    assert added != config
    Path("posttrain.yaml").write_text(added)
    second = result("run", "posttrain.yaml", *smaller)
    assert {name: stage["status"] for name, stage in second["stages"].items()} == {
        "evaluate_base": "cached",
        "sft": "cached",
        "rl": "ran",
        "evaluate": "ran",
        "register": "ran",
    }
    compared = result("compare", run, second["run_id"])
    assert [each["run_id"] for each in compared["runs"]] == [run, second["run_id"]]
    measured = [{suite["key"] for suite in each["suites"]} for each in compared["runs"]]
    assert "held_out/rows/accuracy" in measured[0] and not measured[1]
