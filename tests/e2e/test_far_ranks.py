"""Ranks on two nodes that see no common folder: inputs and checkpoints go through a store on S3."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.runtime.processes import free_ports
from tests.helpers.pipeline import (
    Finished,
    environment,
    prepared,
    run_command,
    start_command,
    tiny_config,
    wait_for_step,
    write_config,
)
from tests.helpers.s3 import BUCKET, S3Server

HIDES = ["unshare", "--mount", "--propagation", "private"]


def _can_hide() -> bool:
    try:
        return subprocess.run([*HIDES, "true"], capture_output=True).returncode == 0
    except OSError:
        return False


pytestmark = [
    pytest.mark.usefixtures("shared_prefect"),
    pytest.mark.skipif(
        find_spec("ray") is None, reason="Ray is not installed: pip install 'posttrain[ray]'"
    ),
    pytest.mark.skipif(
        find_spec("moto") is None, reason="moto is not installed: pip install 'moto[server]'"
    ),
    pytest.mark.skipif(not _can_hide(), reason="mount namespaces need rights that are not here"),
]


class Nodes:
    """Two raylets of one CPU each, with caches of their own, that do not see the folder `hidden`.

    In their mount namespaces an empty file system lies over it.
    """

    def __init__(self, folder: Path, hidden: Path, variables: dict[str, str]) -> None:
        self.caches = [folder / "node-0", folder / "node-1"]
        (self.port,) = free_ports(1)
        self.token = folder / "token"
        self.token.write_text("5" * 64)
        self.token.chmod(0o600)
        self.hidden, self.variables = hidden, variables
        self.sockets = tempfile.TemporaryDirectory(prefix="pt-ray-")
        self.processes = [self._start(0)]
        self._wait(lambda: _listens(self.port))
        self.processes.append(self._start(1))

    @property
    def given(self) -> dict[str, str]:
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.token)}

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        head = ["--head", "--port", str(self.port), "--include-dashboard", "false"]
        head += ["--temp-dir", self.sockets.name]
        role = ["--address", f"127.0.0.1:{self.port}"] if number else head
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *role]
        ray += ["--node-ip-address", "127.0.0.1", "--num-cpus", "1", "--disable-usage-stats"]
        ray += ["--object-store-memory", "100000000"]
        hide = f'mount -t tmpfs none "{self.hidden}" && exec "$@"'
        return subprocess.Popen(
            [*HIDES, "sh", "-c", hide, "sh", *ray],
            env={
                **environment(),
                **self.variables,
                **self.given,
                "POSTTRAIN_CACHE": str(self.caches[number]),
                "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _wait(self, ready: Any) -> None:
        end = time.monotonic() + 120
        while not ready():
            assert time.monotonic() < end and all(p.poll() is None for p in self.processes)
            time.sleep(0.2)

    def ranks(self) -> list[psutil.Process]:
        return [p for p in self._all() if "ray::RankActor" in " ".join(p.cmdline())]

    def _all(self) -> list[psutil.Process]:
        found = []
        for process in self.processes:
            with suppress(psutil.Error):
                one = psutil.Process(process.pid)
                found += [*one.children(recursive=True), one]
        return found

    def stop(self) -> None:
        for process in self._all():
            with suppress(psutil.Error):
                process.kill()
        for started in self.processes:
            started.wait()
        self.sockets.cleanup()


def _listens(port: int) -> bool:
    import socket

    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run's own machine: model, config, home and cache."""
    return tmp_path_factory.mktemp("hidden")


@pytest.fixture(scope="module")
def config(hidden: Path) -> Path:
    made: dict[str, Any] = tiny_config(make_tiny_model(hidden / "model"))
    rl = made["stages"]["rl"] | {
        "inputs": {"model": "sft"},
        "rewards": ["accuracy"],
        "steps": 6,
        "checkpoint_every": 2,
        "evaluate_every": 0,
    }
    stages = {"sft": made["stages"]["sft"], "rl": rl}
    return write_config(hidden / "run.yaml", made | {"stages": stages})


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def nodes(
    hidden: Path, server: S3Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path_factory.mktemp("nodes"), hidden, server.variables)
    yield nodes
    nodes.stop()


def weights(result: dict[str, Any]) -> str:
    made = result["stages"]["rl"]["artifacts"]
    return str(next(a["digest"] for a in made if a["kind"] == "model"))


@pytest.fixture(scope="module")
def local(hidden: Path, config: Path) -> Finished:
    """The run with two ranks of this machine, and no store but a folder."""
    home = prepared(hidden / "local")
    ranks = ("--set", "limits.learner_ranks=2")
    done = run_command("run", str(config), *ranks, "--home", str(home), "--json", timeout=600)
    assert done.code == 0, done.text
    return done


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ranks_that_share_no_folder_make_the_same_weights_also_after_one_was_killed(
    hidden: Path,
    config: Path,
    server: S3Server,
    nodes: Nodes,
    local: Finished,
    request: pytest.FixtureRequest,
) -> None:
    home = prepared(hidden / "home")
    given = ("--set", "limits.learner_ranks=2", "--home", str(home), "--json")
    given += ("--set", f"cluster.ray.address=127.0.0.1:{nodes.port}")
    given += ("--store", f"s3://{BUCKET}/far")
    variables = {**server.variables, **nodes.given, "POSTTRAIN_CACHE": str(hidden / "cache")}
    process = start_command("run", str(config), *given, variables=variables)
    request.addfinalizer(process.kill)
    wait_for_step(home, 3, process)
    (stage,) = (home / "checkpoints").glob("rl-*")
    (pieces,) = stage.glob("step-000002/optimizer/pieces.json")
    assert not list(stage.glob("step-*/**/*.safetensors")), "nothing of it passed the run's machine"
    named = json.loads(pieces.read_text())["files"]
    assert any("shard-00001" in name for name in named), named
    assert any("shard-00002" in name for name in named), named
    ranks = nodes.ranks()
    assert len(ranks) == 2
    ranks[1].kill()
    out, _ = process.communicate(timeout=400)
    result = json.loads(out.strip().splitlines()[-1])
    assert process.returncode == 0 and result["status"] == "completed", out
    assert result["stages"]["rl"]["status"] == "resumed", result["warnings"]
    assert weights(result) == weights(local.result)
    for cache in nodes.caches:
        found = {path.parent.parent.name[:3] for path in cache.rglob("model/model.safetensors")}
        assert found == {"sft"}, "fetched by each node, once"
        assert list(cache.glob("*/models/*/model.safetensors")), "the base model too"
        assert list(cache.glob("*/pieces/*/*/*.safetensors")), "and what was trained so far"
    assert not server.files().find(f"{BUCKET}/far/checkpoints")
