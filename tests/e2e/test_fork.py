"""Forks by the real command: unchanged ones end bit for bit as their parents, of every kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow import MlflowClient

import posttrain
from posttrain.core.kit.tiny import BARE_TEMPLATE, make_tiny_model, make_tiny_tokenizer
from tests.helpers.killer import WHERE, install
from tests.helpers.pipeline import Finished, prepared, run_command, tiny_config, write_config

pytestmark = pytest.mark.usefixtures("shared_prefect")
MEASURED = ("time/", "memory/", "throughput/")
SHORT = {"max_response_length": 6}
FAST = {"learning_rate": 3.0e-3}
RL = {
    "prompts_per_step": 4,
    "num_generations": 4,
    "generation": SHORT,
    "optimizer": {"learning_rate": 1.0e-3},
    "steps": 6,
    "evaluate_every": 3,
}
PAIRS = {"num_prompts": 24, "num_generations": 8, "batch_size": 4, "generation": SHORT}
STAGES: dict[str, dict[str, Any]] = {
    "sft": {"kind": "sft", "inputs": {"model": "base"}, "steps": 20, "batch_size": 32},
    "rm": {"kind": "reward_model", "inputs": {"model": "sft"}, **PAIRS, "epochs": 2},
    "prm": {
        "kind": "process_reward_model",
        "inputs": {"model": "sft"},
        "separator": ";",
        "generation": SHORT,
        "batch_size": 8,
        "num_prompts": 12,
        "num_generations": 4,
        "num_continuations": 4,
        "epochs": 2,
    },
    "dpo": {"kind": "preference", "inputs": {"model": "sft"}, **PAIRS, "epochs": 2},
    "online": {
        "kind": "preference",
        "inputs": {"model": "sft"},
        "batch_size": 5,
        "generation": SHORT,
        "online": {"steps": 7, "refresh_every": 3, "prompts_per_round": 8, "num_generations": 8},
    },
    "student": {
        **RL,
        "kind": "distill",
        "inputs": {"model": "base", "teacher": "sft"},
        "on_policy_share": 0.5,
    },
    "ppo": {**RL, "kind": "rl", "algorithm": "ppo", "inputs": {"model": "sft"}},
    "rl": {
        **RL,
        "kind": "rl",
        "inputs": {"model": "sft"},
        "reward_whiten": "running",
        "max_staleness": 1,
        "kl": {"controller": {"name": "adaptive"}, "ref_update": {"rule": "ema"}},
    },
}
FORKS = {"sft": 9, "rm": 3, "prm": 2, "dpo": 3, "online": 5, "student": 3, "ppo": 3, "rl": 3}
"""Steps with a checkpoint, and steps between two, which are computed again."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run in `home`; the checkpoint of every second step stays. Its id is in `run`."""
    folder = tmp_path_factory.mktemp("small")
    made = tiny_config(make_tiny_model(folder / "model"))
    stages = made["stages"]
    stages["rl"] |= {"rewards": ["accuracy"], "inputs": {"model": "sft"}, "steps": 6}
    stages["rl"] |= {"reward_whiten": "running", "checkpoint_every": 0, "evaluate_every": 3}
    stages["evaluate"]["inputs"] = {"model": "rl"}
    made["stages"] = {name: stages[name] for name in ("sft", "rl", "evaluate")}
    made["keep"] = {"every": 2}
    path, home = write_config(folder / "run.yaml", made), prepared(folder / "home")
    done = run_command("run", str(path), "--home", str(home), "--json")
    assert done.code == 0, done.text
    (folder / "whole.json").write_text(json.dumps(done.result))
    return folder


def test_an_unchanged_fork_is_killed_goes_on_and_ends_as_its_parent(small: Path) -> None:
    whole = Finished(0, "", json.loads((small / "whole.json").read_text()))
    run = whole.result["run_id"]
    variables = {"PYTHONPATH": install(small / "killer"), WHERE: "rl:5"}
    killed = fork(small, run, "--step", "3", "--plain", variables=variables)
    assert killed.code == -9, killed.text
    assert "none after 3: this step is computed again with its settings" in killed.text
    done = fork(small, run, "--step", "3", "--plain")
    assert done.code == 0, done.text
    assert "runs again" not in killed.text + done.text, "nothing was changed"
    assert "[rl] step 3/" not in done.text, "shared steps are not computed"
    assert digests(done) == digests(whole)
    status = {name: stage["status"] for name, stage in done.result["stages"].items()}
    assert status == {"sft": "cached", "rl": "resumed", "evaluate": "cached"}
    assert history(done, "rl") == history(whole, "rl")
    client = MlflowClient(done.result["mlflow_uri"])
    of, stage = client.get_run(done.result["run_id"]), done.result["stages"]["rl"]
    assert of.data.tags["posttrain.forked_from"] == run
    assert f"[{run[:12]}](http" in of.data.tags["mlflow.note.content"]
    tables = [
        Path(file.path).name
        for file in client.list_artifacts(stage["mlflow_run_id"], "tables/samples")
    ]
    assert {f"step-{step:06d}.json" for step in (1, 2, 3)} <= set(tables)
    card = (small / "home" / "runs" / done.result["run_id"] / "run_card.html").read_text()
    assert f"run {run[:12]}, after step 3 of stage rl" in card
    refused = run_command(
        "replay", done.result["run_id"], "--step", "2", "--home", str(small / "home")
    )
    assert refused.code == 2 and f"posttrain replay {run[:12]} --step 2" in refused.text


@pytest.mark.slow
def test_changed_forks_forks_of_forks_and_seeds_from_python(small: Path) -> None:
    home = small / "home"
    whole = json.loads((small / "whole.json").read_text())
    calls = {"home": home, "progress": False}
    longer = {"stages.rl.policy_loss": "gspo", "stages.rl.steps": 7}
    changed = posttrain.fork(whole["run_id"], step=4, overrides=longer, **calls)
    rows = changed.metrics("rl")
    assert list(rows.index) == list(range(8)), "the curve is whole"
    before = posttrain.load(whole["run_id"], home=home).metrics("rl")
    loss = "loss/total"
    assert rows[loss][1:4].equals(before[loss][1:4]) and rows[loss][5] != before[loss][5]
    again = posttrain.fork(changed, step=6, **calls)
    assert again.artifacts["rl/model"].digest == changed.artifacts["rl/model"].digest
    seeds = [posttrain.fork(whole["run_id"], step=4, seed=seed, **calls) for seed in (1, 2)]
    made = {run.artifacts["rl/model"].digest for run in (*seeds, changed)}
    assert len(made) == 3 and whole["stages"]["rl"]["artifacts"][0]["digest"] not in made
    assert {run.stages["sft"].status for run in seeds} == {"cached"}
    drawn = [run.samples("rl", 5)["response"].tolist() for run in seeds]
    assert drawn[0] != drawn[1] and seeds[0].samples("rl", 4).equals(seeds[1].samples("rl", 4))
    report = posttrain.compare(*seeds)
    assert report.values["groups"][0]["seeds"] == [1, 2], "one group, two seeds"
    planned = posttrain.plan(changed.config, home=home, estimates=False)
    assert planned.todo == ()
    with pytest.raises(posttrain.ResourceError, match="keeps checkpoints of steps 2, .*keep.every"):
        posttrain.fork(whole["run_id"], step=1, **calls)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every kind of stage with steps; the checkpoint of every second step stays."""
    folder = tmp_path_factory.mktemp("fork")
    tokenizer = make_tiny_tokenizer("0123456789;", BARE_TEMPLATE)
    model = make_tiny_model(folder / "model", init_std=0.05, tokenizer=tokenizer)
    rows = folder / "rows.jsonl"
    lines = ({"prompt": f"{n:02d}", "answer": f"{n % 10};{n % 10};"} for n in range(100))
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = {
        "name": "forked",
        "engine": "transformers",
        "model": {"source": str(model), "dtype": "float32", "max_model_len": 16},
        "task": {"name": "rows", "path": str(rows), "match": "exact"},
        "evaluation": {"num_problems": 4, **SHORT},
        "limits": {"num_threads": 1},
        "keep": {"every": 2},
        "stages": {name: {"optimizer": FAST, **stage} for name, stage in STAGES.items()},
    }
    write_config(folder / "run.yaml", made)
    return folder


@pytest.fixture(scope="module")
def whole(folder: Path) -> Finished:
    done = run_command(
        "run", str(folder / "run.yaml"), "--home", str(prepared(folder / "home")), "--json"
    )
    assert done.code == 0, done.text
    return done


def fork(folder: Path, run: str, *arguments: str, variables: Any = None) -> Finished:
    where = ("--home", str(folder / "home"), "--json")
    done = run_command("fork", run, *arguments, *where, variables=variables)
    assert "Traceback" not in done.text, done.text
    return done


def digests(run: Finished) -> dict[str, str]:
    return {n: s["artifacts"][0]["digest"] for n, s in run.result["stages"].items()}


def history(run: Finished, stage: str) -> dict[str, list[tuple[int, float]]]:
    """Every metric of a stage that does not measure time or memory, in MLflow."""
    client, of = MlflowClient(run.result["mlflow_uri"]), run.result["stages"][stage]
    names = [
        name
        for name in client.get_run(of["mlflow_run_id"]).data.metrics
        if not name.startswith(MEASURED)
    ]
    return {
        name: sorted(
            (point.step, point.value)
            for point in client.get_metric_history(of["mlflow_run_id"], name)
        )
        for name in names
    }


@pytest.mark.slow
def test_unchanged_forks_of_every_kind_are_bit_identical_also_after_a_kill(
    folder: Path, whole: Finished
) -> None:
    """The forks are written into the config, which `run` takes like any other."""
    made = yaml.safe_load((folder / "run.yaml").read_text())
    record = json.loads(
        (folder / "home" / "runs" / whole.result["run_id"] / "run.json").read_text()
    )
    for name, step in FORKS.items():
        identity = record["stages"][name]
        made["stages"][name]["fork"] = {"stage": f"{name}/{identity}", "step": step}
    path = write_config(folder / "forks.yaml", made)
    where = ("run", str(path), "--home", str(folder / "home"), "--json")
    variables = {"PYTHONPATH": install(folder / "killer"), WHERE: "rl:5"}
    killed = run_command(*where, variables=variables)
    assert killed.code == -9, killed.text
    done = run_command(*where)
    assert done.code == 0, done.text
    assert done.result["stages"]["rl"]["status"] == "resumed"
    assert digests(done) == digests(whole)
    for name in FORKS:
        status = done.result["stages"][name]["status"]
        assert status == ("resumed" if name == "rl" else "cached"), "the killed run had made it"
    assert history(done, "rl") == history(whole, "rl")
