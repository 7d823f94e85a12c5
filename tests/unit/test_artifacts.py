"""The artifact store, stage identities, and checkpoints: complete or absent, never half-written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from posttrain.core.config.rl_stage import RlStage
from posttrain.core.config.sections import OptimizerSection
from posttrain.core.errors import ResourceError, RunError
from posttrain.core.runtime.processes import Owner
from posttrain.core.store.artifacts import Artifact, ArtifactStore, StageResult, check_free_disk
from posttrain.core.store.identity import identity_of, stage_parts
from posttrain.core.store.manifests import MANIFEST, digests_below, tree_digests
from posttrain.core.training.checkpoint import (
    LoopState,
    complete_checkpoints,
    load_checkpoint,
    read_step,
    save_checkpoint,
)
from posttrain.core.training.optim import MasterOptimizer


def stored(store: ArtifactStore, identity: str = "a" * 64) -> Path:
    partial = store.begin("sft")
    (partial / "model").mkdir()
    (partial / "model" / "weights").write_text("w")
    artifact = Artifact("model", str(partial / "model"), "d" * 64, "sft", parents=("p",))
    result = StageResult("sft", "sft", "ran", (artifact,), {"sft/loss": 1.0}, 2.0)
    return store.commit(partial, result, identity, {"steps": "3"}, tree_digests(partial))


def test_a_stored_stage_is_found_again_with_its_files(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    folder = stored(store)
    found, reason = store.lookup("sft", "a" * 64)
    assert found is not None and reason == "cached"
    assert found.artifact("model").path == folder / "model"
    assert found.artifact("model").parents == ("p",)
    assert not list(tmp_path.glob(".partial-*"))
    assert store.lookup("sft", "b" * 64) == (None, "never computed")


def test_the_digest_of_a_part_is_that_of_the_part_alone(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("a/one", "a/b/two", "ab", "a.json"):
        (tmp_path / name).write_text(name)
    files = tree_digests(tmp_path)
    assert digests_below(files, "a") == tree_digests(tmp_path / "a")
    assert digests_below(files, "a/b") == tree_digests(tmp_path / "a" / "b")
    assert digests_below(files, "a.json") == {"a.json": files["a.json"]}


@pytest.mark.parametrize("damage", ["changed", "missing", "added"])
def test_a_damaged_stage_is_a_miss_that_says_so(tmp_path: Path, damage: str) -> None:
    store = ArtifactStore(tmp_path)
    weights = stored(store) / "model" / "weights"
    if damage == "changed":
        weights.write_text("x")
    elif damage == "missing":
        weights.unlink()
    else:
        weights.with_name("more").write_text("x")
    found, reason = store.lookup("sft", "a" * 64)
    assert found is None and reason.startswith("damaged")


@pytest.mark.parametrize("uri", ["../outside", "/etc", "model/../../outside", "link", "model/link"])
def test_an_artifact_whose_path_leaves_the_stage_is_a_miss(tmp_path: Path, uri: str) -> None:
    store = ArtifactStore(tmp_path / "store")
    folder = stored(store)
    (tmp_path / "store" / "outside").mkdir()
    if uri.endswith("link"):
        (folder / uri).symlink_to(tmp_path, target_is_directory=True)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["artifacts"][0]["uri"] = uri
    (folder / MANIFEST).write_text(json.dumps(manifest))
    found, reason = store.lookup("sft", "a" * 64)
    assert found is None and reason.startswith("damaged")


@pytest.mark.parametrize("name", ["weights", "folder"])
def test_a_link_among_the_files_of_a_stage_is_not_followed(tmp_path: Path, name: str) -> None:
    store = ArtifactStore(tmp_path / "store")
    target = tmp_path / "target"
    target.mkdir()
    (target / "weights").write_text("w")
    partial = store.begin("sft")
    (partial / "model").mkdir()
    (partial / "model" / name).symlink_to(target if name == "folder" else target / name)
    artifact = Artifact("model", str(partial / "model"), "d" * 64, "sft")
    result = StageResult("sft", "sft", "ran", (artifact,), {}, 2.0)
    with pytest.raises(RunError, match="symbolic link.*copy files"):
        store.commit(partial, result, "a" * 64, {}, tree_digests(partial))
    # One that replaced a file with equal content afterwards is damage.
    weights = stored(store) / "model" / "weights"
    weights.unlink()
    weights.symlink_to(target / "weights")
    assert store.lookup("sft", "a" * 64)[1].startswith("damaged")


@pytest.mark.parametrize("name", ["../sft", "/tmp/sft", "a/../../sft"])
def test_no_name_of_a_stage_leads_out_of_the_store(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunError, match="is not a stage of"):
        ArtifactStore(tmp_path).folder(name, "a" * 64)


def test_a_folder_without_a_manifest_is_not_a_result(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    (stored(store) / MANIFEST).unlink()
    assert store.lookup("sft", "a" * 64)[0] is None


@pytest.mark.parametrize("text", ["", "[]", '{"version": 1}'])
def test_a_manifest_that_is_none_is_a_miss_and_tells_no_reason(tmp_path: Path, text: str) -> None:
    store = ArtifactStore(tmp_path)
    (stored(store) / MANIFEST).write_text(text)
    found, reason = store.lookup("sft", "a" * 64)
    assert found is None and reason.startswith("damaged")
    assert store.previous_parts("sft") == []


def test_only_what_dead_processes_of_this_machine_left_is_removed(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    mine = store.begin("sft")
    dead = str(replace(Owner.this(), start="1"))
    elsewhere = str(replace(Owner.this(), host="elsewhere", boot="0" * 16))
    others = [tmp_path / f".partial-rl-0@{who}" for who in ("elsewhere@1@5", elsewhere, dead)]
    for folder in others:
        folder.mkdir()
    # Killed before the folder was made, or after it was put in place.
    lone = [tmp_path / f".partial-sft-0@{who}.lock" for who in (dead, elsewhere, str(Owner.this()))]
    for lock in lone:
        lock.touch()
    store.remove_partial()
    kept = sorted(path for path in tmp_path.iterdir() if path.is_dir())
    assert kept == sorted([mine, *others[:2]])
    assert [lock.exists() for lock in lone] == [False, True, True]
    for lock in lone[1:]:
        lock.unlink()
    store.discard(mine)
    assert sorted(tmp_path.iterdir()) == sorted(others[:2]), "its lock file went with it"


def test_a_result_takes_the_place_of_another_that_came_first(tmp_path: Path) -> None:
    """Two machines that share a store may compute one stage at the same time."""
    store = ArtifactStore(tmp_path)
    folder = stored(store)
    (folder / "model" / "weights").write_text("x")
    assert stored(store) == folder
    assert store.lookup("sft", "a" * 64)[1] == "cached"
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


RUN = {
    "seed": 0,
    "task": {"name": "arithmetic"},
    "engine": "auto",
    "model": {"source": "x", "dtype": "float32"},
    "evaluation": {"num_problems": 4},
    "name": "n",
}
STAGE = {"kind": "rl", "inputs": {"model": "sft"}, "steps": 3, "kl": {"coef": 0.1}}
PLUGINS = [("reward", "accuracy", "posttrain 1.2")]


def parts(**changes: object) -> dict[str, str]:
    run = {**RUN, **{k: v for k, v in changes.items() if k in RUN}}
    stage = {**STAGE, **{k: v for k, v in changes.items() if k in STAGE}}
    plugins = changes.get("plugins", PLUGINS)
    digests = changes.get("digests", {"model": "d1"})
    return stage_parts(run, stage, RlStage, digests, plugins, "transformers", "")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"steps": 4},
        {"kl": {"coef": 0.2}},
        {"digests": {"model": "d2"}},
        {"plugins": [("reward", "accuracy", "posttrain 1.3")]},
        {"plugins": [("reward", "accuracy", "posttrain 1.2 0123456789ab")]},
        {"task": {"name": "arithmetic", "style": "word"}},
        {"model": {"source": "x", "dtype": "bfloat16"}},
    ],
    ids=str,
)
def test_everything_that_decides_a_result_is_in_its_identity(change: dict[str, object]) -> None:
    assert identity_of(parts(**change)) != identity_of(parts())


@pytest.mark.parametrize(
    "change",
    [{"name": "other"}, {"model": {"source": "y", "dtype": "float32"}}, {"inputs": {"model": "b"}}],
    ids=str,
)
def test_names_of_things_do_not_change_an_identity(change: dict[str, object]) -> None:
    assert identity_of(parts(**change)) == identity_of(parts())


def make_optimizer(seed: int) -> MasterOptimizer:
    torch.manual_seed(seed)
    module = nn.Linear(3, 2).to(torch.bfloat16)
    return MasterOptimizer(module, OptimizerSection(learning_rate=0.1), 10)


def train(optimizer: MasterOptimizer, steps: int) -> None:
    for step in range(steps):
        for param in optimizer._params:
            param.backward(torch.full_like(param, 1.0 + step))  # type: ignore[no-untyped-call]
        optimizer.step()


def test_a_loaded_checkpoint_continues_bit_for_bit(tmp_path: Path) -> None:
    one = make_optimizer(0)
    train(one, 3)
    state = LoopState(3, {"coef": 0.5}, [{"step": 1.0}])
    save_checkpoint(tmp_path / "step-000003", one, state)
    two = make_optimizer(1)
    assert load_checkpoint(tmp_path / "step-000003", two) == state
    train(one, 2)
    train(two, 2)
    for left, right in zip(one._masters, two._masters, strict=True):
        assert torch.equal(left, right)
    for left, right in zip(one._params, two._params, strict=True):
        assert torch.equal(left, right)
    assert two.step_count == 5


def test_a_damaged_or_foreign_checkpoint_is_refused_never_skipped(tmp_path: Path) -> None:
    optimizer = make_optimizer(0)
    folder = tmp_path / "step-000001"
    save_checkpoint(folder, optimizer, LoopState(1, {}, []))
    path = folder / "optimizer" / "master" / "whole.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(RunError, match="damaged.*--fresh"):
        load_checkpoint(folder, optimizer)
    record = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(record | {"version": 99}))
    with pytest.raises(RunError, match="schema version 99"):
        load_checkpoint(folder, optimizer)
    for broken in (json.dumps(record)[:-9], "[]", "{}"):
        (folder / "state.json").write_text(broken)
        with pytest.raises(RunError, match="damaged.*state.json is not what.*--fresh"):
            load_checkpoint(folder, optimizer)
        with pytest.raises(RunError, match="damaged.*state.json is not what.*--fresh"):
            read_step(folder)


def test_the_newest_complete_checkpoint_is_found(tmp_path: Path) -> None:
    optimizer = make_optimizer(0)
    assert complete_checkpoints(tmp_path) == []
    for step in (2, 10):
        save_checkpoint(tmp_path / f"step-{step:06d}", optimizer, LoopState(step, {}, []))
    (tmp_path / "step-000011").mkdir()  # killed while it was written
    names = [folder.name for folder in complete_checkpoints(tmp_path)]
    assert names == ["step-000010", "step-000002"]


def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="not enough disk space for a run"):
        check_free_disk(tmp_path / "home", 0.0, 1e9, "a run")
    assert not (tmp_path / "home").exists()
