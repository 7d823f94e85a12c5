"""Every form in which a model may be named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from posttrain.core.config.sections import ModelSection, RunName
from posttrain.core.errors import ConfigError, ResourceError
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.models.source import directory_digest
from posttrain.core.store.artifacts import ArtifactStore
from posttrain.core.store.manifests import MANIFEST
from posttrain.core.tracking.mlflow_store import connect, prepare_database
from posttrain.pipelines.run.blame import Blame
from posttrain.pipelines.run.model_reference import base_of, find_base, find_model
from tests.helpers.made_runs import RUN, made_run, made_stage


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "tiny")


@pytest.fixture
def home(tmp_path: Path, model: Path) -> Path:
    made_run(tmp_path / "home", model)
    return tmp_path / "home"


@pytest.mark.parametrize(
    "given",
    [RUN, RUN[:6], f"{RUN[:8]}/sft", f"runs:/{RUN}", f"runs:/{RUN}/sft", f"runs:/{'5' * 32}"],
)
def test_a_run_is_its_last_policy_or_the_stage_that_is_named(home: Path, given: str) -> None:
    found = find_model(given, home)
    assert (found.stage, found.run_id, found.kind) == ("sft", RUN, "model")
    assert found.digest == directory_digest(found.path)
    assert found.mlflow_model_id == "m-1"
    config = found.config()
    assert config is not None and config.name == "tiny"
    assert base_of(found, home).path.name == "tiny"


def test_a_folder_goes_first_and_is_known_where_a_stage_made_it(home: Path, model: Path) -> None:
    outside = find_model(str(model), home)
    assert (outside.stage, outside.run_id) == ("", "") and outside.config() is None
    with pytest.raises(ConfigError, match="the base of .* is not known"):
        base_of(outside, home)
    inside = find_model(str(find_model(RUN, home).path), home)
    assert (inside.stage, inside.run_id) == ("sft", RUN)


def test_a_registered_model_is_found_by_alias_and_version(home: Path) -> None:
    made = find_model(RUN, home)
    client = connect(prepare_database(home))
    client.create_registered_model("sums")
    tags = {"digest": made.digest, "uri": str(made.path)}
    client.create_model_version("sums", str(made.path), tags=tags)
    client.set_registered_model_alias("sums", "champion", "1")
    for given in ("models:/sums/1", "models:/sums@champion", "sums@champion"):
        found = find_model(given, home)
        assert (found.stage, found.digest) == ("sft", made.digest)
    with pytest.raises(ResourceError, match="'sums' has no version 2"):
        find_model("models:/sums/2", home)
    with pytest.raises(ResourceError, match="did you mean 'sums'"):
        find_model("models:/sumz@champion", home)


@pytest.mark.parametrize("database", [True, False])
def test_a_registered_model_that_is_not_there_is_one_error_for_every_command(
    home: Path, database: bool
) -> None:
    if database:
        connect(prepare_database(home)).create_registered_model("sums")
    given = ["models:/sums/2", "models:/sums@champion", "sums@champion", "models:/sumz@champion"]
    for model in given:
        with pytest.raises(ResourceError) as found:
            find_model(model, home)
        with pytest.raises(ResourceError) as blamed:
            Blame(home, home / "artifacts").of(model)
        assert str(blamed.value) == str(found.value)
    for model in ["models:/sumz", "sums/2", *(["sums", "models:/sums"] if database else [])]:
        with pytest.raises(ResourceError, match="there is no such model in MLflow"):
            Blame(home, home / "artifacts").of(model)
    for model in ["sumz", "./2", "~/2"]:
        with pytest.raises(ConfigError, match="no run"):
            Blame(home, home / "artifacts").of(model)


@pytest.mark.parametrize(
    "given, error, says",
    [
        (f"{RUN[:8]}/stf", ConfigError, "has no stage 'stf'; did you mean 'sft'"),
        (f"{RUN[:8]}/rl", ResourceError, "stage 'rl' .* is not done"),
        ("runs:/deadbeef", ConfigError, "no run 'deadbeef'"),
        ("deadbeef", ConfigError, "no run 'deadbeef'"),
        ("./nothing", ConfigError, "is not a known model.*expected a folder, a hub's id"),
        ("models:/sums", ConfigError, "expected models:/NAME@ALIAS"),
        ("runs:/not a run", ConfigError, "expected runs:/RUN"),
    ],
)
def test_what_names_no_model_is_refused_with_what_would(
    home: Path, given: str, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        find_model(given, home)


def test_damaged_weights_are_not_used(home: Path) -> None:
    found = find_model(RUN, home)
    (found.path / "model.safetensors").write_bytes(b"other")
    with pytest.raises(ResourceError, match="damaged"):
        find_model(RUN, home)


@pytest.mark.parametrize("damage", ["no manifest", "a file", "a broken link", "nothing there"])
def test_an_earlier_model_is_not_taken_for_one_that_is_lost(
    tmp_path: Path, model: Path, damage: str
) -> None:
    home = tmp_path / "home"
    record, store = made_run(home, model), ArtifactStore(home / "artifacts")
    identity = made_stage(store, "rl", model, kind="rl")
    record.stage("rl", identity)
    folder = store.folder("rl", identity)
    if damage == "nothing there":  # a stage that read it is done
        record.stage("evaluate", made_stage(store, "evaluate", model, kind="e", makes="evaluation"))
    if damage == "no manifest":
        (folder / MANIFEST).unlink()
    else:
        shutil.rmtree(folder)
    if damage == "a file":
        folder.write_text("")
    elif damage == "a broken link":
        folder.symlink_to(tmp_path / "gone")
    says = f"'{RUN}': what stage 'rl' of run {RUN[:12]} made is gone .* or damaged"
    with pytest.raises(ResourceError, match=says):
        find_model(RUN, home)
    with pytest.raises(ResourceError, match="what stage 'rl' of run"):
        Blame(home, home / "artifacts").of(RUN[:8])
    assert find_model(f"{RUN}/sft", home).stage == "sft"


def test_a_config_begins_with_what_a_run_made(home: Path, model: Path) -> None:
    made = find_model(RUN, home)
    for source in (RUN[:8], f"{RUN[:8]}/sft", f"runs:/{RUN}/sft"):
        found = find_base(ModelSection(source=source), home)
        assert found.section.source == str(made.path)
        assert found.pinned is not None and found.pinned.digest == made.digest
    with pytest.raises(ConfigError, match="made a reward_model"):
        find_base(ModelSection(source=f"{RUN[:8]}/rm"), home)
    # The id of a model on a hub that looks like one of a run.
    assert find_base(ModelSection(source="facade/model"), home).section.source == "facade/model"
    assert find_base(ModelSection(source=str(model)), home).pinned is None


def test_the_form_of_a_run() -> None:
    assert RunName.parse("ab12") == RunName("ab12", None, explicit=False)
    assert RunName.parse("runs:/ab12/rl") == RunName("ab12", "rl", explicit=True)
    assert RunName.parse("HuggingFaceTB/SmolLM2") is None
    assert RunName.parse("./ab12") is None


def test_a_registered_model_with_an_adapter_is_the_one_that_was_made(
    tmp_path: Path, model: Path
) -> None:
    (model / "adapter").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (model / "adapter" / name).write_text("{}")
    home = tmp_path / "home"
    made_run(home, model)
    made = find_model(RUN, home)
    assert made.digest == directory_digest(made.path)
    client = connect(prepare_database(home))
    client.create_registered_model("sums")
    tags = {"digest": made.digest, "uri": str(made.path)}
    client.create_model_version("sums", str(made.path), tags=tags)
    assert find_model("models:/sums/1", home).digest == made.digest
