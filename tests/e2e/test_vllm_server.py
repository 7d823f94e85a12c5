"""The whole DAG on a tiny model with rollouts from a vLLM server that the run starts and stops."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from mlflow import MlflowClient

from posttrain.core.contracts import RolloutEngine
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.plugin_manager import PluginManager
from tests.helpers.pipeline import prepared, run_command, tiny_config, write_config


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_a_run_starts_servers_syncs_them_each_step_and_leaves_none(tmp_path: Path) -> None:
    """Slow: a start of vLLM of its own. tests/contract/test_engines.py has the same in parts."""
    engine = PluginManager().find("rollout_engine", "vllm_server").cls
    assert issubclass(engine, RolloutEngine)
    reason = engine.unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    config = write_config(tmp_path / "run.yaml", tiny_config(make_tiny_model(tmp_path / "tiny")))
    home = prepared(tmp_path / "home")
    done = run_command(
        *("run", str(config), "--set", "engine=vllm_server", "--home", str(home), "--json"),
        timeout=850,
    )
    assert done.code == 0, done.text
    assert {stage["status"] for stage in done.result["stages"].values()} == {"ran"}
    parent = MlflowClient(done.result["mlflow_uri"]).get_run(done.result["mlflow_run_id"])
    assert parent.data.tags["posttrain.engine"] == "vllm_server"
    metrics = done.result["stages"]["rl"]["metrics"]
    assert metrics["mismatch/abs_mean"] < 1e-3  # float32 on both sides
    assert metrics["staleness/max"] == 0.0
    lines = (" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"]))
    assert not [line for line in lines if "vllm" in line and str(tmp_path) in line]
