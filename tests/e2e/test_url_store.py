"""Stages and checkpoints in a store on S3: two machines that share nothing else."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain.core.kit.tiny import make_tiny_model
from tests.helpers.killer import WHERE, install
from tests.helpers.pipeline import (
    Finished,
    journal_lines,
    prepared,
    run_command,
    start_command,
    tiny_config,
    wait_for_step,
    write_config,
)
from tests.helpers.s3 import BUCKET, KEYS, S3Server

pytestmark = pytest.mark.usefixtures("shared_prefect")
STEPS = 6


class Machine:
    """A home and a cache of its own."""

    def __init__(self, folder: Path, server: S3Server) -> None:
        self.home = prepared(folder / "home")
        self.cache = folder / "cache"
        self.variables = {**server.variables, "POSTTRAIN_CACHE": str(self.cache)}

    def run(self, config: Path, store: str, *more: str, **variables: str) -> Finished:
        given = ("run", str(config), "--home", str(self.home), "--store", store, "--json", *more)
        return run_command(*given, variables={**self.variables, **variables})

    def files(self) -> str:
        """All text that this machine keeps."""
        found = [*self.home.rglob("*"), *self.cache.rglob("*")]
        kept = [path for path in found if path.is_file() and path.stat().st_size < 1_000_000]
        return "\n".join(path.read_bytes().decode("utf-8", "replace") for path in kept)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    pytest.importorskip("moto", reason="moto is not installed: pip install 'moto[server]'")
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("config")
    made: dict[str, Any] = tiny_config(make_tiny_model(folder / "model"))
    rl = made["stages"]["rl"] | {
        "inputs": {"model": "sft"},
        "rewards": ["accuracy"],
        "steps": STEPS,
        "checkpoint_every": 1,
        "evaluate_every": 0,
    }
    stages = {"sft": made["stages"]["sft"], "rl": rl}
    return write_config(folder / "run.yaml", made | {"stages": stages})


@pytest.fixture(scope="module")
def undisturbed(
    config: Path, server: S3Server, tmp_path_factory: pytest.TempPathFactory
) -> Finished:
    """The run on machine A, whose stages are in `s3://stages/shared`."""
    machine = Machine(tmp_path_factory.mktemp("a"), server)
    done = machine.run(config, f"s3://{BUCKET}/shared")
    assert done.code == 0 and statuses(done) == {"sft": "ran", "rl": "ran"}, done.text
    assert KEYS["AWS_SECRET_ACCESS_KEY"] not in done.text + machine.files()
    return done


def statuses(done: Finished) -> dict[str, str]:
    return {name: stage["status"] for name, stage in done.result["stages"].items()}


def weights(result: dict[str, Any]) -> str:
    made = result["stages"]["rl"]["artifacts"]
    return str(next(a["digest"] for a in made if a["kind"] == "model"))


@pytest.mark.slow  # two more runs; the killed one below reads the store too
def test_another_machine_finds_everything_and_computes_nothing(
    config: Path, server: S3Server, undisturbed: Finished, tmp_path: Path
) -> None:
    machine = Machine(tmp_path, server)
    store = f"s3://{BUCKET}/shared"
    where = ("--home", str(machine.home), "--store", store, "--json")
    plan = run_command("plan", str(config), "--no-calibration", *where, variables=machine.variables)
    assert [row["cached"] for row in plan.result["stages"]] == [True, True], plan.text
    assert "answers and has 2 finished stages" in plan.result["store"]
    assert not list(machine.cache.rglob("*.safetensors")), "a plan fetches no model"
    done = machine.run(config, store)
    assert done.code == 0 and statuses(done) == {"sft": "cached", "rl": "cached"}, done.text
    assert weights(done.result) == weights(undisturbed.result)
    assert not journal_lines(machine.home, "rl")
    path = Path(next(a["uri"] for a in done.result["stages"]["rl"]["artifacts"]))
    assert path.is_relative_to(machine.cache) and (path / "model.safetensors").is_file()
    assert not server.files().find(f"{BUCKET}/shared/checkpoints"), "those of finished stages"
    assert not server.files().find(f"{BUCKET}/shared/leases")


@pytest.mark.slow
def test_another_machine_goes_on_where_one_was_killed(
    config: Path, server: S3Server, undisturbed: Finished, tmp_path: Path
) -> None:
    store = f"s3://{BUCKET}/killed"
    first, second = Machine(tmp_path / "a", server), Machine(tmp_path / "b", server)
    path = install(tmp_path / "killer")
    killed = first.run(config, store, PYTHONPATH=path, **{WHERE: "rl:5"})
    assert killed.code == -9, killed.text
    kept = server.files().glob(f"{BUCKET}/killed/checkpoints/rl-*/step-*.json")
    assert 1 <= len(kept) <= 3, "keep.checkpoints, and the one that was being pushed"
    done = second.run(config, store)
    assert done.code == 0 and statuses(done) == {"sft": "cached", "rl": "resumed"}, done.text
    assert weights(done.result) == weights(undisturbed.result)
    steps = {json.loads(line)["step"] for line in journal_lines(second.home, "rl")}
    assert steps and min(steps - {0}) > 2, "it did not begin again"
    assert not server.files().find(f"{BUCKET}/killed/checkpoints")


@pytest.mark.slow
def test_a_damaged_object_is_found_and_computed_again(
    config: Path, server: S3Server, undisturbed: Finished, tmp_path: Path
) -> None:
    files, store = server.files(), f"s3://{BUCKET}/damaged"
    files.copy(f"{BUCKET}/shared", f"{BUCKET}/damaged", recursive=True)
    (manifest,) = files.glob(f"{BUCKET}/damaged/stages/rl-*/manifest.json")
    digests = json.loads(files.cat_file(manifest))["files"]
    model = next(d for name, d in digests.items() if name.endswith("model.safetensors"))
    key = manifest.replace("manifest.json", f"files/{model}")
    data = files.cat_file(key)
    files.pipe_file(key, data[:-1] + bytes([data[-1] ^ 1]))
    done = Machine(tmp_path / "b", server).run(config, store)
    assert done.code == 0 and statuses(done) == {"sft": "cached", "rl": "ran"}, done.text
    assert any("computed again" in text and model in text for text in done.result["warnings"])
    assert files.cat_file(key) == data, "it was replaced"


@pytest.mark.slow
def test_a_store_that_goes_away_does_not_end_the_training(
    config: Path, server: S3Server, undisturbed: Finished, tmp_path: Path
) -> None:
    store, machine = f"s3://{BUCKET}/away", Machine(tmp_path / "a", server)
    given = ("--home", str(machine.home), "--store", store, "--json")
    process = start_command("run", str(config), *given, variables=machine.variables)
    try:
        wait_for_step(machine.home, 2, process)
        server.link.cut()
        out, _ = process.communicate(timeout=300)
    finally:
        process.kill()
        server.link.restore()
    result = json.loads(out.strip().splitlines()[-1])
    assert process.returncode == 0 and result["status"] == "completed", out
    assert weights(result) == weights(undisturbed.result)
    assert any("does not answer" in text for text in result["warnings"]), result["warnings"]
    assert any(f"posttrain send --store {store}" in text for text in result["warnings"])
    assert "Traceback" not in out
    sent = run_command("send", *given, variables=machine.variables)
    assert sent.code == 0 and "were sent to the store" in sent.text, sent.text
    done = Machine(tmp_path / "b", server).run(config, store)
    assert done.code == 0 and statuses(done) == {"sft": "cached", "rl": "cached"}, done.text


def test_what_is_wrong_with_a_store_is_one_sentence(
    config: Path, server: S3Server, tmp_path: Path
) -> None:
    machine = Machine(tmp_path, server)
    where = ("--home", str(machine.home), "--json", "--store")

    def refused(store: str, **variables: str) -> str:
        given = ("validate", str(config), *where, store)
        done = run_command(*given, variables={**machine.variables, **variables})
        assert done.code != 0 and "Traceback" not in done.text, done.text
        return done.text

    assert "has no bucket" in refused("s3://nothing-of-this-name/here")
    said = refused("s3://user:hunter22@stages/here")
    assert "a password" in said and "hunter22" not in said
    nowhere = {"HOME": str(tmp_path), "AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
    assert "no credentials" in refused(f"s3://{BUCKET}/here", **nowhere)
    began = time.monotonic()
    closed = "http://127.0.0.1:9"
    assert "does not answer" in refused(f"s3://{BUCKET}/here", AWS_ENDPOINT_URL=closed)
    assert time.monotonic() - began < 60
    assert "expected s3://BUCKET/PREFIX" in refused("s3://")
    assert "cannot be used" in refused("nonsense://bucket/here")
    doctor = run_command("doctor", *where, f"s3://{BUCKET}/here", variables=machine.variables)
    (found,) = [f for f in doctor.result["findings"] if f["name"] == "store"]
    assert found["status"] == "ok" and "takes, gives and removes" in found["detail"]


@pytest.mark.slow
def test_a_folder_can_be_a_url_too(config: Path, server: S3Server, tmp_path: Path) -> None:
    store = f"file://{tmp_path}/nfs"
    one, other = Machine(tmp_path / "a", server), Machine(tmp_path / "b", server)
    done = one.run(config, store)
    assert done.code == 0 and statuses(done) == {"sft": "ran", "rl": "ran"}, done.text
    done = other.run(config, store)
    assert done.code == 0 and statuses(done) == {"sft": "cached", "rl": "cached"}, done.text
