"""A run whose models keep float32 weights and compute in bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlflow import MlflowClient
from safetensors.torch import load_file

from posttrain.core.kit.tiny import make_tiny_model
from tests.helpers.pipeline import prepared, run_command, tiny_config, write_config

pytestmark = pytest.mark.usefixtures("shared_prefect")

# What is right by chance differs between processors; how long a response is differs everywhere.
ALWAYS_LEARNS = ["accuracy", {"name": "length_penalty", "alpha": 0.1}]


def test_stages_train_and_save_float32_and_the_engine_follows(tmp_path: Path) -> None:
    config = tiny_config(make_tiny_model(tmp_path / "model"))
    config["model"]["dtype"] = "autocast"
    stages = config["stages"]
    rl = stages["rl"] | {"inputs": {"model": "sft"}, "rewards": ALWAYS_LEARNS}
    rl["kl"] = {"controller": {"name": "fixed", "coef": 0.1}}  # asks for a reference
    rl |= {"checkpoint_every": 0, "num_mini_batches": 1}
    config["stages"] = {"sft": stages["sft"], "rl": rl}
    path = write_config(tmp_path / "run.yaml", config)
    done = run_command("run", str(path), "--home", str(prepared(tmp_path / "home")), "--json")
    assert done.code == 0, done.text
    for stage in done.result["stages"].values():
        model = next(a for a in stage["artifacts"] if a["kind"] == "model")
        weights = load_file(Path(model["uri"]) / "model.safetensors")
        assert {str(tensor.dtype) for tensor in weights.values()} == {"torch.float32"}
    uri = done.result["mlflow_uri"]
    client = MlflowClient(uri, registry_uri=uri)
    experiment = done.result["mlflow_experiment_id"]
    (run,) = client.search_runs([experiment], "tags.`posttrain.stage` = 'rl'")

    def history(key: str) -> list[float]:
        found = client.get_metric_history(run.info.run_id, key)
        return [metric.value for metric in sorted(found, key=lambda metric: metric.step)]

    # The engine rounds the weights that the trainer casts: bfloat16's gap, not that of old weights.
    assert all(0 < value < 0.05 for value in history("mismatch/k3"))
    references = history("kl/ref_k3")
    assert references[0] < 1e-6 < references[-1], "the reference is the policy that began"
