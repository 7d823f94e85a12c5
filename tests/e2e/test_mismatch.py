"""Engine and trainer through the real loop: they agree at every step, or the run says so."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from posttrain.core.config.alarms import AlarmsSection
from posttrain.core.contracts import RolloutEngine
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.plugin_manager import PluginManager
from tests.helpers.pipeline import Finished, prepared, run_command, tiny_config, write_config

pytestmark = pytest.mark.usefixtures("shared_prefect")

STEPS = 11
NO_OTHER_ALARM = {
    name: False if name == "overoptimised" else None for name in AlarmsSection.model_fields
}
PLUGIN = '''
"""Engines whose weight sync does not do what it says."""

from posttrain.core.contracts import PluginConfig
from posttrain.core.hooks import hookimpl
from posttrain.plugins.engines.transformers import TransformersEngine


class Forgetful(TransformersEngine):
    """Counts versions and keeps its weights; cannot tell what weights it has."""

    name = "forgetful"
    Config = TransformersEngine.Config

    def sync_weights(self, weights, policy_version):
        self.policy_version = policy_version

    def differing_weights(self, weights):
        return None


class Honest(Forgetful):
    """As forgetful, but asked for its weights it tells."""

    name = "honest"
    Config = TransformersEngine.Config

    def differing_weights(self, weights):
        return TransformersEngine.differing_weights(self, weights)


@hookimpl
def posttrain_register():
    return [Forgetful, Honest]
'''


def config(model: Path, engine: str, **rl: Any) -> dict[str, Any]:
    """Two rl stages from one model: one samples as it is, one from a sharper distribution cut
    twice.
    """
    made = tiny_config(model)
    shared = made["stages"]["rl"] | {
        "inputs": {"model": "base"},
        "rewards": ["accuracy", "format"],
        "steps": STEPS,
        "num_mini_batches": 1,
        "evaluate_every": 0,
        "checkpoint_every": 0,
        **rl,
    }
    distribution = {"max_response_length": 8, "temperature": 0.7, "top_p": 0.8, "top_k": 20}
    correction = {"plugin": {"name": "tis_token", "statistics": "full"}}
    # An alarm at every step: float32 rounding alone makes a k3 of 1e-14.
    alarm = {"mismatch_alarm": 1e-18}
    cut = shared | {"generation": distribution, "rollout_correction": correction} | alarm
    stages = {"plain": shared, "cut": cut}
    # This model sets off others as well, which test_alarms is about.
    return made | {"engine": engine, "stages": stages, "alarms": NO_OTHER_ALARM}


def curves(done: Finished, stage: str, *names: str, last: int = STEPS) -> list[list[float]]:
    """Each metric at each step up to the `last`."""
    client = MlflowClient(done.result["mlflow_uri"])
    run = done.result["stages"][stage]["mlflow_run_id"]
    found = []
    for name in names:
        points = sorted(client.get_metric_history(run, name), key=lambda point: point.step)
        assert [point.step for point in points] == list(range(1, last + 1)), name
        found.append([point.value for point in points])
    return found


def rung(done: Finished, stage: str) -> list[float]:
    """The values of the stage's metric of the alarm."""
    client = MlflowClient(done.result["mlflow_uri"])
    run = done.result["stages"][stage]["mlflow_run_id"]
    return [point.value for point in client.get_metric_history(run, "alarm/mismatch")]


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
@pytest.mark.slow
def test_engine_and_trainer_agree_at_every_step_under_every_law_and_an_alarm_is_told_once(
    tmp_path: Path, engine: str
) -> None:
    found = PluginManager().find("rollout_engine", engine).cls
    assert issubclass(found, RolloutEngine)
    if found.unavailable_reason():
        pytest.skip(str(found.unavailable_reason()))
    # The entropy bonus moves the weights also where all rewards are equal.
    settings = config(make_tiny_model(tmp_path / "model", init_std=0.2), engine, entropy_coef=0.01)
    if engine == "vllm":
        settings["engine"] = {"name": "vllm", "kv_cache_gb": 0.25}
    path = write_config(tmp_path / "run.yaml", settings)
    done = run_command(
        "run", str(path), "--home", str(prepared(tmp_path / "home")), "--json", timeout=550
    )
    assert done.code == 0, done.text
    for stage in ("plain", "cut"):
        gaps, k3, cost, whole = curves(
            done, stage, "mismatch/abs_max", "mismatch/k3", "time/sync_check_s", "time/step_s"
        )
        # The engine that can tell of its weights is probed after the first sync alone.
        probed = 1 if engine == "transformers" else STEPS
        names = ("sync/probe_abs_max", "sync/probe_change")
        probe, moved = curves(done, stage, *names, last=probed)
        assert max(gaps) < 1e-4
        assert max(k3) < 1e-6
        alarms = rung(done, stage)
        assert alarms == [] if stage == "plain" else len(alarms) > 1
        assert max(probe) < 1e-4
        assert min(moved) > 1e-3, "the weights moved, and the engine with them"
        assert sum(cost) < 0.5 * sum(whole)
    low, high, cuts = curves(done, "cut", "is_weight/raw_min", "is_weight/raw_max", "tis/clip_frac")
    assert 0.999 < min(low) <= max(high) < 1.001, "a correction of nothing is none"
    assert max(cuts) == 0
    # All statistics of the correction are more metrics than a step may have.
    (warning,) = [
        text for text in done.result["warnings"] if "metrics more than the 100" not in text
    ]
    assert warning.startswith("cut: alarm mismatch: step ") and "mismatch/k3" in warning
    client = MlflowClient(done.result["mlflow_uri"])
    run = client.get_run(done.result["stages"]["cut"]["mlflow_run_id"])
    assert run.data.tags["posttrain.alarm.mismatch"] in warning


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third party's package with the two engines, installed for the command."""
    info = tmp_path / "site" / "engines-1.0.dist-info"
    info.mkdir(parents=True)
    (info.parent / "bad_engines.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: engines\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[posttrain.plugins]\nbad = bad_engines\n")
    paths = [str(info.parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize(
    ("engine", "proof"),
    [
        pytest.param("forgetful", "46 probe tokens are bit for bit", marks=pytest.mark.slow),
        ("honest", "differ from the trainer's"),
    ],
)
def test_a_skipped_weight_sync_stops_the_run_at_the_first_step(
    tmp_path: Path, engine: str, proof: str
) -> None:
    # The entropy bonus moves the weights also where all rewards are equal.
    made = config(make_tiny_model(tmp_path / "model"), engine, entropy_coef=0.01)
    del made["stages"]["cut"]
    path = write_config(tmp_path / "run.yaml", made)
    done = run_command(
        "run", str(path), "--home", str(prepared(tmp_path / "home")), "--json", timeout=550
    )
    assert done.code == 1, done.text
    assert f"engine '{engine}' kept its old weights after the sync of step 1" in done.text
    assert proof in done.text
    assert "Traceback" not in done.text
