"""Ctrl-C, SIGTERM and kill -9: nothing half-written, runs marked, the command continues."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import yaml
from mlflow import MlflowClient

from posttrain.core.kit.tiny import make_tiny_model
from tests.helpers.learning import Budget, learning_config, make_model
from tests.helpers.pipeline import (
    Finished,
    prepared,
    run_command,
    run_loaded,
    start_command,
    tiny_config,
    wait_for_step,
    write_config,
)
from tests.helpers.plugin_site import offer


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("interruption")
    made = tiny_config(make_tiny_model(folder / "model"))
    made["stages"]["rl"]["steps"] = 8
    made["stages"]["rl"]["reward_whiten"] = "running"  # it keeps a state from step to step
    return write_config(folder / "run.yaml", made)


def statuses(home: Path) -> list[str]:
    client = MlflowClient(f"sqlite:///{home}/mlflow/mlflow.db")
    experiments = [e.experiment_id for e in client.search_experiments()]
    return [run.info.status for run in client.search_runs(experiments)]


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, id="SIGINT"),
        pytest.param(signal.SIGTERM, id="SIGTERM", marks=pytest.mark.slow),
    ],
)
def test_a_stop_signal_ends_within_seconds_and_marks_the_runs(
    config: Path, tmp_path: Path, number: signal.Signals
) -> None:
    process = start_command("run", str(config), "--home", str(prepared(tmp_path / "home")))
    wait_for_step(tmp_path / "home", 2, process)
    began = time.monotonic()
    process.send_signal(number)
    text, _ = process.communicate(timeout=30)
    assert time.monotonic() - began < 10
    assert process.returncode == 130, text
    for dump in (
        "Traceback",
        "Exception ignored",
        "resource_tracker",
        "Thread 0x",
        "Crash detected",
    ):
        assert dump not in text, text
    assert "workflowType=machine_learning" in text and "/runs/flow-run/" in text, "its pages"
    assert text.rstrip().endswith("the same command continues the run")
    found = statuses(tmp_path / "home")
    assert found.count("KILLED") == 2, found  # the rl stage and the pipeline
    assert set(found) == {"KILLED", "FINISHED"}
    assert not list((tmp_path / "home" / "artifacts").glob(".partial-*"))


LOST_INTERRUPT = '''
import os, signal
from posttrain.core.contracts import NoConfig, Reward
from posttrain.core.hooks import hookimpl
from posttrain.core.types import Score

class Lost(Reward[NoConfig]):
    """Is stopped by a signal, and loses it."""

    name = "lost"
    Config = NoConfig
    runs_in = "host"

    def score(self, samples):
        try:
            os.kill(os.getpid(), signal.NUMBER)
            signal.pause()
        except BaseException:
            INSTEAD
        return [Score(0.0) for _ in samples]

@hookimpl
def posttrain_register():
    return [Lost]
'''


ERROR = 'raise ValueError("Task run is not set") from None'


@pytest.mark.parametrize(
    ("number", "instead"),
    [
        pytest.param("SIGINT", "pass", id="SIGINT-nothing", marks=pytest.mark.slow),
        pytest.param("SIGTERM", ERROR, id="SIGTERM-error", marks=pytest.mark.slow),
        pytest.param("SIGINT", ERROR, id="SIGINT-error", marks=pytest.mark.slow),
        pytest.param("SIGTERM", "pass", id="SIGTERM-nothing", marks=pytest.mark.slow),
    ],
)
def test_an_interrupt_that_a_library_loses_is_still_a_stop(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str, instead: str
) -> None:
    """Prefect makes an error of it while a task run begins, and a finalizer that is interrupted, as
    there are while modules are imported, tells nobody; a plugin of an entry point does it here.
    """
    made = yaml.safe_load(config.read_text())
    rl = made["stages"]["rl"] | {"rewards": ["lost"], "inputs": {"model": "base"}}
    made["stages"] = {"rl": rl}
    plugin = LOST_INTERRUPT.replace("NUMBER", number).replace("INSTEAD", instead)
    offer(tmp_path, "lost", plugin, monkeypatch)
    home = prepared(tmp_path / "home")
    done = run_command("run", str(write_config(tmp_path / "run.yaml", made)), "--home", str(home))
    assert done.code == 130, done.text
    assert "the same command continues" in done.text
    assert statuses(home).count("KILLED") == 2, statuses(home)
    assert "FAILED" not in statuses(home)


@pytest.mark.usefixtures("reports_to_shared_prefect")
def test_everything_that_lives_from_step_to_step_survives_kill_9(
    config: Path, tmp_path: Path
) -> None:
    """A critic with its head start, a KL, an entropy bonus and a penalty that adapt, a moving
    reference."""
    made = yaml.safe_load(config.read_text())
    made["stages"] = {name: made["stages"][name] for name in ("sft", "reward_model", "rl")}
    made["stages"]["rl"] |= {
        "algorithm": "ppo_penalty",
        "critic": {"pretrain_steps": 2, "optimizer": {"learning_rate": 1.0e-3}},
        "kl": {
            "estimator": "k1",
            "place": "reward",
            "controller": {"name": "adaptive", "coef": 0.1, "horizon": 200},
            "ref_update": {"rule": "bema", "every": 3},
        },
        "entropy_controller": {"name": "adaptive", "target": 100},
        "epochs": 2,
    }
    path = write_config(tmp_path / "run.yaml", made)
    whole = run_loaded("run", str(path), "--home", str(prepared(tmp_path / "whole")), "--json")
    assert whole.code == 0, whole.text
    found = history(whole)
    assert found["value/pretraining"][0][1] == 1 and found["value/pretraining"][-1][1] == 0
    assert len({value for _, value in found["kl/coef"]}) > 1, "the controller moved"
    assert found["kl/ref_version"][-1][1] > 0, "the reference moved"
    assert len({value for _, value in found["entropy/coef"]}) > 1, "and that of the entropy bonus"
    assert_continues_bit_for_bit(path, tmp_path / "home", whole)


@pytest.mark.slow
def test_rollouts_sampled_ahead_and_groups_carried_over_survive_kill_9(tmp_path: Path) -> None:
    """Killed while rollouts of later steps wait for their update, some of their groups carried."""
    fields = {
        "max_staleness": 1,
        "checkpoint_every": 1,
        "rewards": ["accuracy"],
        "sampler": {"name": "dynamic", "keep": "spread"},
    }
    budgets = {"rl": Budget(20, fields, preset="dapo")}
    config = learning_config(make_model(tmp_path, seed=0), budgets, seed=0)
    path = write_config(tmp_path / "run.yaml", config)
    whole = run_command("run", str(path), "--home", str(prepared(tmp_path / "whole")), "--json")
    assert whole.code == 0, whole.text
    found = history(whole)
    ages = [age for _, age in found["staleness/max"]]
    assert ages[0] == 0 and min(ages[1:]) == 1, "the first rollout has nothing to lie behind"
    assert max(ages) == 2, "groups carried over are one update older than the rollout they join"
    assert_continues_bit_for_bit(path, tmp_path / "home", whole)


# Preset, fields, and a metric that shows that there is something to remember.
REMEMBERED: dict[str, tuple[str, dict[str, object], str]] = {
    "replay": (
        "dr_grpo",
        {"sampler": {"name": "replay", "share": 0.5, "max_lag": 3}},
        "replay/taken_frac",
    ),
    "curriculum": (
        "dr_grpo",
        {"sampler": {"name": "curriculum", "candidates": 2.0}},
        "curriculum/known",
    ),
    "process rewards": (
        "prime",
        {"implicit_prm": {"optimizer": {"learning_rate": 1.0e-3}}},
        "prm/process_std",
    ),
    "imitation": ("chord", {"ptx": {"num_examples": 8}}, "loss/coef/ptx"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", REMEMBERED)
def test_what_a_plugin_remembers_survives_kill_9(tmp_path: Path, what: str) -> None:
    preset, fields, metric = REMEMBERED[what]
    budgets = {"rl": Budget(20, {"checkpoint_every": 1, **fields}, preset=preset)}
    config = learning_config(make_model(tmp_path, seed=0), budgets, seed=0)
    if preset == "chord":
        config["stages"]["rl"]["algorithm"] = {"name": "chord", "variant": "mu"}
    path = write_config(tmp_path / "run.yaml", config)
    whole = run_command("run", str(path), "--home", str(prepared(tmp_path / "whole")), "--json")
    assert whole.code == 0, whole.text
    assert max(value for _, value in history(whole)[metric]) > 0
    assert_continues_bit_for_bit(path, tmp_path / "home", whole)


def assert_continues_bit_for_bit(config: Path, home: Path, uninterrupted: Finished) -> None:
    """Killed in the middle of RL, the same command ends where an uninterrupted one does."""
    process = start_command("run", str(config), "--home", str(prepared(home)))
    wait_for_step(home, 5, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    done = run_loaded("run", str(config), "--home", str(home), "--json")
    assert done.code == 0, done.text
    status = {name: stage["status"] for name, stage in done.result["stages"].items()}
    assert status.get("sft", "cached") == "cached"
    assert status["rl"] == "resumed"
    assert "KILLED" in statuses(home)

    def digest(run: Finished) -> str:
        artifacts = run.result["stages"]["rl"]["artifacts"]
        return str(next(a["digest"] for a in artifacts if a["kind"] == "model"))

    assert digest(done) == digest(uninterrupted), "bit for bit the same weights"
    assert history(done) == history(uninterrupted)


def history(run: Finished) -> dict[str, list[tuple[int, float]]]:
    """Every metric of the rl stage that does not measure time or memory, by step."""
    client = MlflowClient(run.result["mlflow_uri"])
    parent = run.result["mlflow_run_id"]
    rl = client.search_runs(
        [run.result["mlflow_experiment_id"]],
        f"tags.mlflow.parentRunId = '{parent}' and tags.posttrain.stage = 'rl'",
    )[0]
    measured = ("time/", "memory/", "throughput/")
    return {
        key: [(m.step, m.value) for m in client.get_metric_history(rl.info.run_id, key)]
        for key in sorted(rl.data.metrics)
        if not key.startswith(measured)
    }


@pytest.mark.usefixtures("reports_to_shared_prefect")
def test_a_stage_that_cannot_go_on_says_so_in_one_sentence(config: Path, tmp_path: Path) -> None:
    """Prompts that are all longer than the model allows are found when the stage has begun."""
    home = prepared(tmp_path / "home")
    limit = "model.max_model_len=20"
    done = run_loaded("run", str(config), "--set", limit, "--home", str(home))
    assert done.code == 3, done.text
    assert "exceeds model.max_model_len 20" in done.text
    assert "Traceback" not in done.text
    assert done.text.count("error: ") == 1
    assert set(statuses(home)) == {"FAILED"}
    assert not list((home / "artifacts").glob("*"))
