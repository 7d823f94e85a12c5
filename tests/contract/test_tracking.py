"""What a run leaves in MLflow: real runs in a real SQLite database, read back with MLflow's client.

The database is migrated once per session and copied for each test.
"""

import json
import re
import shutil
import subprocess
import sys
import urllib.parse
from pathlib import Path

import mlflow
import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NOTE
from transformers import AutoConfig, AutoModelForSequenceClassification

from posttrain.core.errors import ResourceError, RunError
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.tracking import registry
from posttrain.core.tracking.mlflow_run import KnownModel
from posttrain.core.tracking.mlflow_tracker import (
    PipelineTracker,
    StageTracker,
    prepare_database,
)

DIGEST = "0123456789abcdef" * 4


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("migrated")
    prepare_database(home)
    return home / "mlflow" / "mlflow.db"


@pytest.fixture
def uri(migrated: Path, tmp_path: Path) -> str:
    (tmp_path / "mlflow").mkdir()
    shutil.copy(migrated, tmp_path / "mlflow" / "mlflow.db")
    return prepare_database(tmp_path)


def start(uri: str) -> PipelineTracker:
    return PipelineTracker.start(
        uri=uri,
        experiment="demo",
        run_name="first",
        config_yaml="name: demo\n",
        params={"seed": 0, "model": {"dtype": "bfloat16", "revision": None}, "betas": [0.9, 0.99]},
        tags={"posttrain.prefect_flow_run": "f-1"},
    )


def read(uri: str, run_id: str) -> Run:
    return MlflowClient(tracking_uri=uri).get_run(run_id)


def history(uri: str, run_id: str, key: str) -> list[tuple[int, float]]:
    points = MlflowClient(tracking_uri=uri).get_metric_history(run_id, key)
    return sorted((point.step, point.value) for point in points)


def artifact(uri: str, run_id: str, path: str) -> Path:
    root = urllib.parse.urlparse(read(uri, run_id).info.artifact_uri).path
    return Path(urllib.parse.unquote(root)) / path


def test_the_parent_run_holds_config_settings_tags_and_lies_beside_the_database(uri: str) -> None:
    tracker = start(uri)
    tracker.log_metrics({"eval/gain": 0.25})
    tracker.finish("FINISHED")
    run = read(uri, tracker.run_id)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "first")
    assert run.info.experiment_id == tracker.experiment_id and tracker.uri == uri
    assert run.data.params == {
        "seed": "0",
        "model.dtype": "bfloat16",
        "model.revision": "null",
        "betas": "[0.9, 0.99]",
    }
    assert run.data.tags["posttrain.prefect_flow_run"] == "f-1"
    assert run.data.metrics == {"eval/gain": 0.25}
    config = artifact(uri, tracker.run_id, "config.yaml")
    assert config.read_text() == "name: demo\n"
    assert Path(uri.removeprefix("sqlite:///")).parent / "artifacts" in config.parents


def test_stages_are_children_and_a_cached_one_points_to_its_original(uri: str) -> None:
    tracker = start(uri)
    stage = tracker.stage("sft", "sft", {"steps": 3})
    stage.log_step(1, {"sft/loss": 0.5})
    stage.finish("FINISHED")
    again = tracker.cached_stage("sft", "sft", stage.run_id, {"sft/loss": 0.5})
    assert read(uri, again).info.status == "FINISHED"
    tracker.log_metrics({"sft/sft/loss": 0.5, "sft/loss": 0.5})
    with pytest.raises(RunError, match="unknown metric 'rl/sft/loss'"):
        tracker.log_metrics({"rl/sft/loss": 0.5})
    tracker.finish("FINISHED")
    for run_id in (stage.run_id, again):
        tags = read(uri, run_id).data.tags
        assert tags["mlflow.parentRunId"] == tracker.run_id
        assert (tags["posttrain.stage"], tags["posttrain.kind"]) == ("sft", "sft")
        assert tags["run"] == "first", "the list of stages says which run each belongs to"
    assert read(uri, stage.run_id).data.params == {"steps": "3"}
    copy = read(uri, again)
    assert copy.data.tags["posttrain.cached_from"] == stage.run_id
    assert copy.data.metrics == {"sft/loss": 0.5}


def test_a_model_of_another_tracking_server_is_entered_here_once(uri: str) -> None:
    tracker = start(uri)
    stage = tracker.stage("sft", "sft", {})
    own = stage.log_model_output(name="sft", uri="/a/sft", digest="d1", step=0)
    again = tracker.cached_stage("rl", "rl", "of another server", {})
    foreign = KnownModel("m-0123456789abcdef0123456789abcdef", "/a/rl", "d2")
    known = KnownModel(own, "/a/sft", "d1")
    ids = tracker.known_models(again, "rl", [known, foreign])
    assert ids[0] == own
    assert tracker.known_models(again, "rl", [foreign]) == ids[1:], "found again, not made again"
    stage.log_model_input(ids[1])  # which a later stage can read
    tracker.finish("FINISHED")
    client = MlflowClient(tracking_uri=uri)
    made = client.get_logged_model(ids[1])
    assert made.source_run_id == again
    assert made.tags["posttrain.digest"] == "d2" and made.tags["posttrain.uri"] == "/a/rl"
    assert [o.model_id for o in read(uri, again).outputs.model_outputs] == ids[1:]
    assert len(client.search_logged_models([tracker.experiment_id])) == 2


def test_stepped_metrics_keep_their_step_and_leave_out_what_was_not_measured(uri: str) -> None:
    tracker = start(uri)
    stage = tracker.stage("rl", "rl", {})
    for step in (1, 2, 10):
        stage.log_step(step, {"lr": step / 10, "reward/mean": float("nan"), "adv/mean": None})
    stage.log_summary({"lr": 1.0, "eval/greedy_accuracy": 0.5})
    tracker.finish("FINISHED")
    assert history(uri, stage.run_id, "lr") == [(1, 0.1), (2, 0.2), (10, 1.0)]
    assert history(uri, stage.run_id, "eval/greedy_accuracy") == [(10, 0.5)]
    # The second is there twice: MLflow shows the groups of charts by their names.
    shown = read(uri, stage.run_id).data.metrics
    assert shown == {"lr": 1.0, "eval/greedy_accuracy": 0.5, "0_main/held_out_accuracy": 0.5}


def test_a_step_is_one_call_of_at_most_a_hundred_known_metrics(uri: str) -> None:
    tracker = start(uri)
    stage = tracker.stage("rl", "rl", {})
    assert stage.log_step(1, {f"plugin/{i}": i for i in range(100)}) == ()
    more = {f"plugin/{i:03}": 1.0 for i in range(100)} | {"alarm/ess_seq": 1.0, "reward/mean": 0.5}
    assert stage.log_step(2, more) == ("plugin/098", "plugin/099")
    with pytest.raises(RunError, match="did you mean 'reward/mean'"):
        stage.log_step(2, {"reward/maen": 1.0})
    tracker.finish("FINISHED")
    client = MlflowClient(tracking_uri=uri)
    points = [client.get_metric_history(stage.run_id, f"plugin/{i}") for i in range(100)]
    assert {len(point) for point in points} == {1}
    assert len({point[0].timestamp for point in points}) == 1
    assert client.get_metric_history(stage.run_id, "alarm/ess_seq")
    assert client.get_metric_history(stage.run_id, "plugin/097")
    assert not client.get_metric_history(stage.run_id, "plugin/098")


@pytest.mark.parametrize("status", ["FAILED", "KILLED", "FINISHED"])
def test_open_stages_end_as_the_pipeline_does_and_then_record_nothing(
    uri: str, status: str
) -> None:
    tracker = start(uri)
    stage = tracker.stage("rl", "rl", {})
    stage.log_step(1, {"lr": 0.1})
    tracker.finish(status)  # type: ignore[arg-type]
    tracker.finish("FINISHED")
    assert {read(uri, run).info.status for run in (tracker.run_id, stage.run_id)} == {status}
    assert history(uri, stage.run_id, "lr") == [(1, 0.1)]
    with pytest.raises(RunError, match="is finished"):
        stage.log_step(2, {"lr": 0.1})


def test_a_write_that_failed_is_raised_and_the_runs_are_not_shown_as_finished(uri: str) -> None:
    tracker = start(uri)
    lost, other = tracker.stage("rl", "rl", {}), tracker.stage("sft", "sft", {})
    MlflowClient(tracking_uri=uri).delete_run(lost.run_id)
    lost.log_step(1, {"lr": 0.1})
    with pytest.raises(RunError, match="could not record step 1 in MLflow at sqlite"):
        tracker.finish("FINISHED")
    MlflowClient(tracking_uri=uri).restore_run(lost.run_id)
    assert read(uri, other.run_id).info.status == "FAILED"
    assert read(uri, tracker.run_id).info.status == "FAILED"


def test_a_table_of_each_step_can_be_loaded_by_mlflow(uri: str) -> None:
    tracker = start(uri)
    stage = tracker.stage("rl", "rl", {})
    for step in (10, 20):
        rows: list[dict[str, object]] = [
            {"prompt": "2+3?", "reward": float(step)},
            {"prompt": "2+4?", "reward": None},
        ]
        stage.log_table("samples", step, rows)
    tracker.finish("FINISHED")
    mlflow.set_tracking_uri(uri)
    mlflow.set_experiment("demo")
    table = mlflow.load_table("tables/samples/step-000020.json", run_ids=[stage.run_id])
    assert list(table["prompt"]) == ["2+3?", "2+4?"] and table["reward"][0] == 20.0
    listed = json.loads(read(uri, stage.run_id).data.tags["mlflow.loggedArtifacts"])
    assert [entry["path"][-16:] for entry in listed] == ["step-000010.json", "step-000020.json"]


def test_runs_that_record_the_same_new_dataset_at_the_same_moment_all_have_it(uri: str) -> None:
    """MLflow looks whether it is there, then adds it: of two at once, the database refuses one."""
    trackers = [start(uri) for _ in range(4)]
    stages = [tracker.stage("sft", "sft", {}) for tracker in trackers]
    names = [f"arithmetic-{number}" for number in range(25)]
    for name in names:
        for stage in stages:  # each has a thread of its own that writes
            stage.log_dataset(name, "train", DIGEST, 640, "arithmetic seed 0")
    for stage, tracker in zip(stages, trackers, strict=True):
        stage.finish("FINISHED")
        tracker.finish("FINISHED")
        found = read(uri, stage.run_id).inputs.dataset_inputs
        assert sorted(item.dataset.name for item in found) == sorted(names)


def test_datasets_show_as_inputs_with_their_digest(uri: str) -> None:
    tracker = start(uri)
    stage = tracker.stage("sft", "sft", {})
    stage.log_dataset("arithmetic", "train", DIGEST, 640, "arithmetic seed 0")
    tracker.finish("FINISHED")
    inputs = read(uri, stage.run_id).inputs
    assert inputs is not None
    (item,) = inputs.dataset_inputs
    assert (item.dataset.name, item.dataset.digest) == ("arithmetic", DIGEST[:36])
    assert json.loads(item.dataset.profile or "") == {"num_rows": 640, "sha256": DIGEST}
    assert [(tag.key, tag.value) for tag in item.tags] == [("mlflow.data.context", "train")]
    assert read(uri, tracker.run_id).inputs.dataset_inputs == [item], "the pipeline's run too"


def model(stage: StageTracker, step: int = 5) -> str:
    return stage.log_model_output(name="policy", uri="/runs/policy", digest=DIGEST, step=step)


def test_models_chain_the_stage_that_made_them_to_the_stage_that_read_them(uri: str) -> None:
    tracker = start(uri)
    sft, rl = tracker.stage("sft", "sft", {}), tracker.stage("rl", "rl", {})
    model_id = model(sft)
    rl.log_model_input(model_id)
    rl.log_summary({"eval/greedy_accuracy": 0.5}, model_id=model_id)
    tracker.finish("FINISHED")
    made, used = read(uri, sft.run_id).outputs, read(uri, rl.run_id).inputs
    assert made is not None and used is not None
    (output,), (taken,) = made.model_outputs, used.model_inputs
    assert (output.model_id, output.step, taken.model_id) == (model_id, 5, model_id)
    whole = read(uri, tracker.run_id).outputs
    assert whole is not None and [o.model_id for o in whole.model_outputs] == [model_id]
    logged = MlflowClient(tracking_uri=uri).get_logged_model(model_id)
    assert logged.source_run_id == sft.run_id and str(logged.status) == "READY"
    assert logged.tags["posttrain.digest"] == DIGEST
    assert logged.tags["mlflow.source.name"] == "posttrain"
    assert logged.tags["mlflow.model.isExternal"] == "true", "a server can register it"
    assert [(m.key, m.value) for m in logged.metrics or []] == [("eval/greedy_accuracy", 0.5)]


def register_model(uri: str, model_id: str, name: str, alias: str, tags: dict[str, str]) -> str:
    version = registry.register_champion(uri, model_id, name, tags)
    registry.move_alias(uri, name, alias, version)
    return version


def test_registering_moves_the_alias_and_never_makes_a_second_version_of_one_model(
    uri: str,
) -> None:
    tracker = start(uri)
    stage = tracker.stage("rl", "rl", {})
    first, second = model(stage, 1), model(stage, 2)
    tracker.finish("FINISHED")
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    mlflow.set_tracking_uri("sqlite:////nowhere/else.db")  # as in a process that made no model
    assert register_model(uri, first, "demo", "candidate", {"gain": "0.1"}) == "1"
    assert str(client.get_model_version_by_alias("demo", "candidate").version) == "1"
    assert register_model(uri, second, "demo", "candidate", {}) == "2"
    assert str(client.get_model_version_by_alias("demo", "candidate").version) == "2"
    assert register_model(uri, first, "demo", "champion", {"gain": "0.2"}) == "1"
    version = client.get_model_version("demo", "1")
    assert version.tags == {"gain": "0.2"} and version.run_id == stage.run_id
    assert len(client.search_model_versions("name = 'demo'")) == 2
    with pytest.raises(ResourceError, match="could not register models:/m-none"):
        register_model(uri, "m-none", "demo", "candidate", {})


@pytest.mark.parametrize("folder", ["model", pytest.param("reward_model", marks=pytest.mark.slow)])
def test_the_code_on_a_models_page_loads_it(uri: str, tmp_path: Path, folder: str) -> None:
    made = make_tiny_model(tmp_path / folder)
    if folder == "reward_model":
        config = AutoConfig.from_pretrained(made, num_labels=1, trust_remote_code=False)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(made)
    stage = start(uri).stage("sft", "sft", {})
    model_id = stage.log_model_output(name=folder, uri=str(made), digest=DIGEST, step=1)
    page = MlflowClient(tracking_uri=uri).get_logged_model(model_id).tags[MLFLOW_RUN_NOTE]
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    shown = (
        "print(type(model).__name__, model(**tokenizer('1 + 2', return_tensors='pt')).logits.shape)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code + shown], capture_output=True, text=True, timeout=120
    )
    kind = "SequenceClassification" if folder == "reward_model" else "CausalLM"
    assert f"LlamaFor{kind} torch.Size([1, " in done.stdout, done.stderr
    assert "newly initialized" not in done.stderr


def test_files_folders_and_texts_become_artifacts(uri: str, tmp_path: Path) -> None:
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "a.png").write_bytes(b"png")
    tracker = start(uri)
    stage = tracker.stage("evaluate", "evaluate", {})
    stage.log_file(tmp_path / "report" / "a.png", "plots")
    stage.log_file(tmp_path / "report", "folder")
    stage.log_text("hello", "notes/hello.txt")
    with pytest.raises(RunError, match="missing.png"):
        stage.log_file(tmp_path / "missing.png")
    tracker.finish("FAILED")
    for path in ("plots/a.png", "folder/a.png", "notes/hello.txt"):
        assert artifact(uri, stage.run_id, path).is_file()
