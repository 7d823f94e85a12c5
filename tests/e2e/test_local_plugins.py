"""A run whose plugins are files next to its config: identity, processes, record, later commands."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain.core.contracts import CONTRACTS
from posttrain.core.kit.new import class_name, file_of
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.tracking.mlflow_store import prepare_database
from tests.helpers.pipeline import prepared, run_command, tiny_config, write_config

pytestmark = pytest.mark.usefixtures("shared_prefect")

TASK = """
from posttrain.core.contracts import NoConfig, Task
from posttrain.core.types import Problem, Verdict


class Count(Task[NoConfig]):
    "Count on: after n comes n + 1."

    name, Config = "count", NoConfig

    def problems(self, split, count, seed):
        first = 0 if split == "train" else 500
        numbers = range(first, first + count)
        return [Problem(str(n), f"{n},", str(n + 1), str(n + 1)) for n in numbers]

    def verify(self, problem, text):
        return Verdict(float(text.strip() == problem.answer), text or None)
"""
REWARDS = """
import pathlib

import words
from posttrain.core.contracts import PluginConfig, Reward
from posttrain.core.types import Score
from pydantic import Field

LIMIT = int((pathlib.Path(__file__).parent / "limit.txt").read_text())


class BriefConfig(PluginConfig):
    scale: float = Field(1.0, description="of the reward")


class Brief(Reward[BriefConfig]):
    "R = scale for an answer of at most LIMIT characters of one alphabet."

    name, Config = "brief", BriefConfig

    def score(self, samples):
        import late  # found in a worker process, and after the file was moved

        scale = self.config.scale
        texts = [sample.text for sample in samples]
        return [Score(scale * words.share(t) * late.short(t, LIMIT)) for t in texts]
"""
WORDS = "def share(text):\n    return sum(c.isdigit() for c in text) / max(1, len(text))\n"
LATE = "def short(text, limit):\n    return float(len(text) <= limit)\n"
ADVANTAGE = """
from posttrain.core.contracts import GroupAdvantage, GroupConfig


class Mine(GroupAdvantage[GroupConfig]):
    "A = R - mean of the group."

    name, Config = "mine", GroupConfig

    def group_advantages(self, rewards, rows, batch):
        return rewards - rewards.mean()
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config, its plugins and a run."""
    folder = tmp_path_factory.mktemp("local plugins")
    (folder / "my rewards").mkdir()
    files = {
        "my_task.py": TASK,
        "my_adv.py": ADVANTAGE,
        "my rewards/brief.py": REWARDS,
        "my rewards/words.py": WORDS,
        "my rewards/late.py": LATE,
        "my rewards/limit.txt": "6",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    config = tiny_config(make_tiny_model(folder / "model"))
    config["task"] = "my_task.py:Count"
    rl = config["stages"]["rl"] | {
        "inputs": {"model": "base"},
        "steps": 2,
        "advantage": "my_adv.py:Mine",
        "rewards": [{"name": "my rewards/brief.py:Brief", "scale": 2}, "accuracy"],
    }
    config["stages"] = {"rl": rl}
    write_config(folder / "run.yaml", config)
    prepared(folder / "home")
    return folder


def run(folder: Path, *more: str) -> dict[str, Any]:
    config = str(folder / "run.yaml")
    done = run_command("run", config, "--home", str(folder / "home"), "--json", *more)
    assert done.code == 0, done.text
    return done.result


def test_local_plugins_from_run_to_rescoring(project: Path) -> None:
    first = run(project)
    home, run_id = project / "home", first["run_id"]
    record = home / "runs" / run_id
    config = yaml.safe_load((record / "config.yaml").read_text())
    (brief, accuracy) = config["stages"]["rl"]["rewards"]
    assert (brief["name"], brief["label"]) == ("brief.py:Brief", "brief")
    assert accuracy["label"] == "accuracy" and config["task"]["name"] == "my_task.py:Count"
    copies = record / "plugins"
    assert config["plugin_files"]["brief.py"] == "plugins/my_rewards/brief.py"
    kept = {path.name for path in (copies / "my_rewards").iterdir() if path.is_file()}
    assert kept == {"brief.py", "words.py", "late.py", "limit.txt"}

    # MLflow has the same files, and metrics go by the clean name.
    import mlflow

    client = mlflow.MlflowClient(prepare_database(home))
    artifacts = {each.path for each in client.list_artifacts(run_id, "plugins/my_rewards")}
    assert "plugins/my_rewards/brief.py" in artifacts
    (child,) = client.search_runs(
        [client.get_run(run_id).info.experiment_id],
        f"tags.`mlflow.parentRunId` = '{run_id}'",
    )
    assert "reward/component/brief/mean" in child.data.metrics or any(
        "brief" in name for name in child.data.metrics
    )

    # The same files give the same stage; a moved project too.
    assert run(project)["stages"]["rl"]["status"] == "cached"
    moved = project.parent / "elsewhere"
    shutil.copytree(project, moved, ignore=shutil.ignore_patterns("home"))
    again = run_command("plan", str(moved / "run.yaml"), "--home", str(home), "--json")
    assert again.code == 0 and again.result["stages"][0]["cached"], again.text

    # An edit of an imported neighbour, or of a data file, is another stage.
    (project / "my rewards" / "words.py").write_text(WORDS.replace("isdigit", "isalpha"))
    plan = run_command("plan", str(project / "run.yaml"), "--home", str(home), "--json")
    assert not plan.result["stages"][0]["cached"]
    assert "source of reward plugin brief.py:Brief changed" in plan.text

    # Edits and deletions do not change the past.
    (project / "my_adv.py").unlink()
    (project / "my rewards" / "late.py").write_text("broken(")
    (project / "my rewards" / "limit.txt").write_text("0")
    for command in (
        ["replay", run_id, "--step", "2"],
        ["rescore", run_id, "--reward", "brief.py:Brief,scale=2:0.5"],
        ["compare", run_id, "--step", "1", "--algorithm", "rloo"],
    ):
        done = run_command(*command, "--home", str(home), "--json")
        assert done.code == 0, done.text
    (record / "mine.json").write_text(json.dumps(first, default=str))


@pytest.mark.slow  # a run for each of the templates, which `plugins check` tests too
def test_what_new_writes_for_every_kind_works_in_a_run_untouched(tmp_path: Path) -> None:
    named = {}
    for kind in CONTRACTS:
        name, text = file_of(kind, f"my_{kind}")
        (tmp_path / name).write_text(text)
        named[kind] = f"{name}:{class_name(f'my_{kind}')}"
    pair = {"prompt": "1,", "chosen": "2", "rejected": "3"}
    rows = [json.dumps({**pair, "prompt": f"{number},"}) + "\n" for number in range(12)]
    (tmp_path / "pairs.jsonl").write_text("".join(rows))
    config = tiny_config(make_tiny_model(tmp_path / "model"))
    config["model"]["renderer"] = named["renderer"]
    config["task"] = named["task"]
    small = {"kind": "rl", "steps": 1, "prompts_per_step": 2, "num_generations": 2}
    small |= {"generation": {"max_response_length": 8}, "rewards": [named["reward"]]}
    config["stages"] = {
        "short": {"kind": named["stage"], "num_problems": 20},
        "rl": small
        | {
            "inputs": {"model": "base", "dataset": "short"},
            "algorithm": named["algorithm"],
            "advantage": named["advantage"],
            "policy_loss": named["policy_loss"],
            "aggregator": named["aggregator"],
            "kl": {"estimator": named["kl"], "controller": named["kl_controller"]},
            "entropy_controller": named["entropy_controller"],
            "rollout_correction": {"plugin": named["rollout_correction"]},
            "environment": named["environment"],
            "sampler": named["sampler"],
            "optimizer": {"name": named["optimizer"], "learning_rate": 1.0e-4},
        },
        "tools": small
        | {
            "inputs": {"model": "base"},
            "environment": {"name": "tools", "tools": [named["tool"]]},
        },
        "dpo": {
            "kind": "preference",
            "inputs": {"model": "base"},
            "data": str(tmp_path / "pairs.jsonl"),
            "preference_loss": named["preference_loss"],
            "epochs": 1,
            "batch_size": 4,
        },
    }
    write_config(tmp_path / "run.yaml", config)
    stages = run(tmp_path)["stages"]
    assert {stage["status"] for stage in stages.values()} == {"ran"}
    evaluate = {"kind": "evaluate", "inputs": {"model": "base"}}
    config |= {"engine": named["rollout_engine"], "stages": {"evaluate": evaluate}}
    write_config(tmp_path / "run.yaml", config)
    assert run(tmp_path)["stages"]["evaluate"]["status"] == "ran"
