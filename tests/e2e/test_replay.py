"""Past steps computed again by the real command, and finished stages shared between two homes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow import MlflowClient
from safetensors.torch import load_file, save_file

from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.store.manifests import file_digest, tree_digests
from posttrain.core.training.checkpoint import complete_checkpoints
from tests.helpers.pipeline import (
    Finished,
    prepared,
    run_command,
    start_command,
    tiny_config,
    write_config,
)

pytestmark = pytest.mark.usefixtures("shared_prefect")

WEIGHT = "policy/model.layers.0.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config whose even steps are recorded, with the checkpoints of every second one kept."""
    folder = tmp_path_factory.mktemp("replay")
    config = tiny_config(make_tiny_model(folder / "model"))
    stages = config["stages"]
    stages["rl"] |= {"rewards": ["accuracy"], "inputs": {"model": "sft"}, "steps": 6}
    stages["rl"] |= {"evaluate_every": 3, "reward_whiten": "running", "checkpoint_every": 0}
    stages["rl"]["kl"] = {"controller": {"name": "fixed", "coef": 0.1}}
    stages["sft"] |= {"steps": 5, "checkpoint_every": 1}
    stages["evaluate"]["inputs"] = {"model": "rl"}
    config["stages"] = {name: stages[name] for name in ("sft", "rl", "evaluate", "register")}
    config["keep"] = {"every": 2, "records": 2, "checkpoints": 2}
    write_config(folder / "run.yaml", config)
    return folder


@pytest.fixture(scope="module")
def first(workspace: Path) -> Finished:
    return run(workspace, prepared(workspace / "one"))


def run(workspace: Path, home: Path, *more: str) -> Finished:
    done = run_command(
        "run",
        str(workspace / "run.yaml"),
        *("--home", str(home), "--store", str(workspace / "shared"), "--json"),
        *more,
    )
    assert done.code == 0, done.text
    return done


def replay(workspace: Path, home: Path, run_id: str, *arguments: str) -> Finished:
    places = ("--home", str(home), "--store", str(workspace / "shared"), "--json")
    done = run_command("replay", run_id, *places, *arguments)
    assert "Traceback" not in done.text
    return done


def everything(folder: Path) -> dict[str, str]:
    """All files of a home that a run made, by digest; not the databases' own side files."""
    found = tree_digests(folder)
    return {name: digest for name, digest in found.items() if not name.endswith(("-wal", "-shm"))}


def test_a_middle_step_is_computed_again_alike_and_nothing_is_written(
    workspace: Path, first: Finished
) -> None:
    home, shared = workspace / "one", workspace / "shared"
    before = everything(home), everything(shared)
    done = replay(workspace, home, first.result["run_id"][:10], "--step", "4")
    assert done.code == 0, done.text
    found = done.result
    assert (found["stage"], found["from_step"], found["equal"]) == ("rl", 2, True)
    (compared,) = found["steps"]
    assert compared["step"] == 4 and compared["tensors"] > 25 and compared["metrics"] > 40
    assert found["notes"] == [], "nothing differs on the machine that took the step"
    assert (everything(home), everything(shared)) == before


def test_a_step_that_was_not_recorded_says_which_were_and_what_to_set(
    workspace: Path, first: Finished
) -> None:
    done = replay(workspace, workspace / "one", first.result["run_id"], "--step", "3")
    assert done.code == 4, done.text
    assert "Of this run can be: 2, 4, 6" in done.text and "keep.records=1" in done.text


def test_a_changed_weight_and_a_changed_record_are_named(workspace: Path, first: Finished) -> None:
    """0.5 added to one weight that was kept after step 4, and another weight's digest replaced."""
    home = workspace / "one"
    (kept,) = (home / "checkpoints").glob("rl-*/kept/step-000004")
    path = kept / "optimizer" / "master" / "whole.safetensors"
    untouched, state = path.read_bytes(), (kept / "state.json").read_text()
    masters = load_file(path)
    (record,) = (workspace / "shared").glob("rl-*/replay/steps.jsonl")
    recorded = record.read_text()
    row = next(r for r in map(json.loads, recorded.splitlines()) if r.get("step") == 4)
    number = list(row["weights"]).index(WEIGHT)
    masters[str(number)][3, 5] += 0.5
    save_file(masters, path)
    sums: Any = json.loads(state)
    sums["optimizers"]["."]["sha256"]["optimizer/master/whole.safetensors"] = file_digest(path)
    (kept / "state.json").write_text(json.dumps(sums))
    later = "policy/model.norm.weight"
    record.write_text(recorded.replace(row["weights"][later], "0" * 16))
    try:
        done = replay(workspace, home, first.result["run_id"], "--step", "4")
    finally:
        path.write_bytes(untouched)
        (kept / "state.json").write_text(state)
        record.write_text(recorded)
    assert done.code == 1, done.text
    found = done.result["first_difference"]
    assert found["name"] == WEIGHT and found["where"] == [3, 5]
    assert found["shape"] == list(masters[str(number)].shape)
    assert found["max_abs"] == pytest.approx(0.5)
    names = [d["name"] for d in done.result["steps"][0]["differences"]]
    assert names == [WEIGHT, later], "in the order of the optimizer"
    assert any("changed after the run" in note for note in done.result["notes"])


@pytest.mark.slow
def test_two_homes_share_finished_stages(workspace: Path, first: Finished) -> None:
    """The second home's own MLflow knows none of the models: they are entered there once."""
    home = prepared(workspace / "two")
    champion = "stages.register.alias=champion"
    done = run(workspace, home, "--set", champion)
    status = {name: stage["status"] for name, stage in done.result["stages"].items()}
    assert status == {"sft": "cached", "rl": "cached", "evaluate": "cached", "register": "ran"}
    assert "register: runs again, changed: stages.register.alias candidate -> champion" in done.text
    for name in ("sft", "rl"):
        theirs, ours = (r.result["stages"][name]["artifacts"] for r in (first, done))
        assert ours == theirs
    assert not (home / "artifacts").exists()
    client = MlflowClient(done.result["mlflow_uri"], registry_uri=done.result["mlflow_uri"])
    version = client.get_model_version_by_alias("tiny", "champion")
    model = client.get_logged_model(str(version.source).removeprefix("models:/"))
    assert model.tags["posttrain.digest"] == done.result["stages"]["rl"]["artifacts"][0]["digest"]
    experiment = [done.result["mlflow_experiment_id"]]
    assert len(client.search_logged_models(experiment)) == 2, "sft's and rl's, once each"
    # What the first home registered is in the store as well, but not in this registry.
    registered = run(workspace, home)
    assert registered.result["stages"]["register"]["status"] == "ran"
    assert client.get_model_version_by_alias("tiny", "candidate").version == version.version
    for home_name in ("one", "two"):
        settled = run(workspace, workspace / home_name)
        assert settled.result["stages"]["register"]["status"] == "cached"
    # Its run can be replayed too; the checkpoints are the other home's, so from the beginning.
    again = replay(workspace, home, done.result["run_id"], "--step", "2", "--stage", "rl")
    assert again.code == 0, again.text
    assert again.result["from_step"] == 0 and again.result["equal"]


@pytest.mark.slow  # one more run of the whole pipeline
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    workspace: Path, first: Finished
) -> None:
    """Two are kept: with a flipped bit in the newest, the stage goes on from the other, alike."""
    home = prepared(workspace / "three")
    only = write_config(workspace / "sft.yaml", sft_only(workspace))
    process = start_command("run", str(only), "--home", str(home), "--plain")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("[sft] step 4/"):
            break
    process.kill()
    process.wait()
    (root,) = (home / "checkpoints").iterdir()
    newest = complete_checkpoints(root)[0]
    weights = min(newest.rglob("whole.safetensors"))
    kept = weights.read_bytes()
    weights.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    shutil.rmtree(home / "artifacts", ignore_errors=True)
    done = run_command("run", str(only), "--home", str(home), "--json")
    assert done.code == 0, done.text
    (warning,) = done.result["warnings"]
    assert "is damaged and was moved" in warning and newest.name in warning
    stage = done.result["stages"]["sft"]
    assert stage["status"] == "resumed"
    assert (
        stage["artifacts"][0]["digest"] == first.result["stages"]["sft"]["artifacts"][0]["digest"]
    )


def sft_only(workspace: Path) -> dict[str, Any]:

    config: dict[str, Any] = yaml.safe_load((workspace / "run.yaml").read_text())
    config["stages"] = {"sft": config["stages"]["sft"]}
    return config
