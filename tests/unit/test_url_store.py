"""Stores with a URL, over a real S3 server and a folder: leases, checkpoints, what is refused."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from posttrain.core.errors import ConfigError, ResourceError, RunError
from posttrain.core.store import lease, urls
from posttrain.core.store.lease import leased
from posttrain.core.store.mirror import Mirror, mirror_of
from posttrain.core.store.pushing import Pusher
from posttrain.core.store.remote import DamagedObject, Remote, StoreAway
from posttrain.core.training.checkpoint import complete_checkpoints
from posttrain.core.training.remote_checkpoints import RemoteCheckpoints
from tests.helpers.s3 import BUCKET, S3Server


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    if find_spec("moto") is None:
        pytest.skip("moto is not installed: pip install 'moto[server]'")
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture(params=["s3", "file"])
def remote(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Remote:
    if request.param == "file":
        return Remote(f"file://{tmp_path}/shared")
    server: S3Server = request.getfixturevalue("server")
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    return Remote(f"s3://{BUCKET}/{tmp_path.name}")


def hold(remote: Remote, told: list[str], notes: list[str], check: object = None) -> object:
    return leased(
        remote,
        "leases/rl-1",
        waits=told.append,
        check=check if callable(check) else lambda: None,
        note=notes.append,
    )


def test_one_holds_a_lease_and_the_next_waits(remote: Remote) -> None:
    told: list[str] = []
    order: list[str] = []

    def second() -> None:
        with hold(remote, told, []):  # type: ignore[attr-defined]
            order.append("second")

    with hold(remote, [], []):  # type: ignore[attr-defined]
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(2.5)
        order.append("first")
    thread.join(20)
    assert order == ["first", "second"]
    assert len(told) == 1 and f"process {os.getpid()}" in told[0]
    assert remote.version("leases/rl-1") == "", "it is given back"


def test_a_lease_that_nobody_renews_is_taken_over_and_its_holder_is_told(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(lease.LEASE_VARIABLE, "2")
    # Of a machine that is not known here.
    gone = json.dumps({"holder": "elsewhere@7@1@other@other", "beat": "1"}).encode()
    assert remote.create("leases/rl-1", gone)
    assert not remote.create("leases/rl-1", gone), "one can be the first"
    began, notes = time.monotonic(), list[str]()
    with hold(remote, [], notes):  # type: ignore[attr-defined]
        assert 2 < time.monotonic() - began < 20
        mine = remote.version("leases/rl-1")
        time.sleep(1.5)
        assert remote.version("leases/rl-1") != mine, "it is renewed"
        remote.put("leases/rl-1", gone)  # as another would that has waited in vain
        time.sleep(1.5)
    assert len(notes) == 1 and "another machine took over rl-1" in notes[0]
    assert remote.get("leases/rl-1") == gone, "what another holds is left alone"


def test_of_two_that_replace_one_version_one_does(remote: Remote) -> None:
    remote.put("leases/x", b"1")
    version = remote.version("leases/x")
    assert remote.replace("leases/x", b"2", version)
    assert not remote.replace("leases/x", b"3", version)
    assert remote.get("leases/x") == b"2"


def test_files_come_back_as_they_were_or_not_at_all(remote: Remote, tmp_path: Path) -> None:
    mirror = Mirror(tmp_path / "cache", remote.url)
    source = tmp_path / "model"
    (source / "sub").mkdir(parents=True)
    (source / "a.bin").write_bytes(b"1" * 100)
    (source / "sub/b.bin").write_bytes(b"2" * 100)
    mirror.push_model(source, "d" * 64)
    found = mirror.fetched_model("d" * 64)
    assert (found / "sub/b.bin").read_bytes() == b"2" * 100
    manifest = remote.get_json("models/" + "d" * 64 + "/manifest.json")
    first = manifest["files"]["a.bin"]
    other = Mirror(tmp_path / "other", remote.url)
    remote.put("models/" + "d" * 64 + f"/files/{first}", b"3" * 100)
    with pytest.raises(DamagedObject, match="another digest"):
        other.fetched_model("d" * 64)
    remote.remove(["models/" + "d" * 64 + f"/files/{first}"])
    with pytest.raises(DamagedObject, match="is gone"):
        other.fetched_model("d" * 64)
    assert not (other.root / "models" / ("d" * 64)).exists(), "nothing half-written"
    outside = {"files": {"../../escaped": manifest["files"]["sub/b.bin"]}}
    remote.put_json("models/" + "e" * 64 + "/manifest.json", outside)
    with pytest.raises(RunError, match="not a path below"):
        other.fetched_model("e" * 64)
    assert not list(tmp_path.rglob("escaped"))


def checkpoint(root: Path, step: int) -> Path:
    folder = root / f"step-{step:06d}"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps({"step": step}))
    (folder / "tensors.bin").write_bytes(bytes([step]) * 1000)
    return folder


def test_the_newest_whole_checkpoint_is_brought_and_old_ones_go(
    remote: Remote, tmp_path: Path
) -> None:
    mirror = Mirror(tmp_path / "cache", remote.url)
    here, there = tmp_path / "a/rl-1", tmp_path / "b/rl-1"
    (here / "replay").mkdir(parents=True)
    (here / "replay/steps.jsonl").write_text("of steps\n")
    saved = RemoteCheckpoints(mirror, here, 2, print)
    for step in (1, 2, 3):
        saved.push(checkpoint(here, step))
        assert not mirror.pusher.wait(0)
    names = set(remote.found("checkpoints/rl-1"))
    assert {n for n in names if n.startswith("step")} == {"step-000002.json", "step-000003.json"}
    assert len(names) == 2 + 5, "two states, two tensors, and the record they share"
    warned: list[str] = []
    RemoteCheckpoints(mirror, there, 2, warned.append).bring()
    newest = complete_checkpoints(there)[0]
    assert newest.name == "step-000003" and not warned
    assert (newest / "tensors.bin").read_bytes() == bytes([3]) * 1000
    assert (there / "replay/steps.jsonl").read_text() == "of steps\n"
    digest = remote.get_json("checkpoints/rl-1/step-000003.json")["files"]["tensors.bin"]
    remote.put(f"checkpoints/rl-1/files/{digest}", b"damaged")
    third = tmp_path / "c/rl-1"
    RemoteCheckpoints(mirror, third, 2, warned.append).bring()
    newest = complete_checkpoints(third)[0]
    assert newest.name == "step-000002"
    assert len(warned) == 1 and "step 3 in the store is damaged" in warned[0]
    saved.forget()
    assert not mirror.pusher.wait(0)
    assert not remote.found("checkpoints/rl-1")


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:secret12@bucket/x",
        "s3://key@bucket",
        "s3://bucket/x?key=secret12",
        "s3://",
        "file://",
    ],
)
def test_a_url_with_credentials_or_without_a_place_is_refused(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        urls.cached(url)
    assert "secret12" not in str(refused.value)


def test_the_cache_of_a_url_is_one_folder_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(urls.CACHE_VARIABLE, str(tmp_path))
    folder = urls.cached("s3://bucket/x/")
    # A path has made one slash of two.
    assert folder == urls.cached(str(Path("s3://bucket/x"))) and folder.parent == tmp_path
    assert urls.cached("s3://bucket/y") != folder
    assert urls.url_of(folder) == "s3://bucket/x" and urls.url_of(tmp_path) == ""
    urls.mark(folder)
    monkeypatch.setattr(urls, "_known", {})  # as another process
    assert urls.url_of(folder) == "s3://bucket/x"
    assert mirror_of(tmp_path / "plain") is None


def test_a_store_that_is_away_or_refuses_is_one_error(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ResourceError, match="has no bucket") as missing:
        Remote("s3://not-there/x").check()
    assert not isinstance(missing.value, StoreAway)
    Remote(f"s3://{BUCKET}/fine").check()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StoreAway, match="does not answer"):
        Remote(f"s3://{BUCKET}/x").check()


def test_what_fails_to_be_sent_is_reported_and_holds_up_nothing() -> None:
    pusher, sent = Pusher("s3://bucket"), []

    def fail() -> None:
        raise ValueError("an answer that nobody expected")

    pusher.add("stage sft", fail)
    pusher.add("stage rl", lambda: sent.append("rl"))
    assert pusher.wait(5.0) == [] and sent == ["rl"]
    (news,) = pusher.news()
    assert news.startswith(
        "stage sft was not sent to the store s3://bucket: ValueError: an answer that"
    )


def test_an_address_that_is_no_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="store .*: is not a URL .*; correct it"):
        urls.checked("s3://[::1/stages")
