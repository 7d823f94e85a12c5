"""What a run's pod does on Kubernetes, with an API server of this test that starts real Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.runtime.processes import free_ports
from tests.helpers.pipeline import environment, tiny_config, write_config

SCRIPT = Path(__file__).parents[2] / "infra/kubernetes/with_ray.py"
TOKEN = "7" * 64
pytestmark = pytest.mark.skipif(
    find_spec("ray") is None, reason="Ray is not installed: pip install 'posttrain[ray]'"
)


class FakeKubernetes:
    """Takes a RayCluster, starts a head and a node as KubeRay would, and ends them on delete."""

    def __init__(self, folder: Path, *, refuses: bool = False) -> None:
        self.asked: list[tuple[str, str]] = []
        self.cluster: dict[str, Any] = {}
        self.refuses = refuses
        (self.port,) = free_ports(1)
        self.sockets = tempfile.TemporaryDirectory(prefix="pt-kube-")
        self.processes: list[subprocess.Popen[bytes]] = []
        self.account = folder / "account"
        self.account.mkdir()
        (self.account / "namespace").write_text("posttrain")
        (self.account / "token").write_text("a-token-of-the-pod")
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.headers["Authorization"] == "Bearer a-token-of-the-pod"
                fake.asked.append(("POST", self.path))
                if fake.refuses:
                    self._answer(403, {"message": "rayclusters.ray.io is forbidden"})
                    return
                fake.cluster = json.loads(body)
                fake.start()
                self._answer(201, fake.cluster)

            def do_DELETE(self) -> None:
                fake.asked.append(("DELETE", self.path))
                fake.stop()
                self._answer(200, {})

            def _answer(self, code: int, value: object) -> None:
                text = json.dumps(value).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *given: object) -> None:
                """Not in the tests' output."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def variables(self) -> dict[str, str]:
        return {
            **environment(),
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": TOKEN,
        }

    def start(self) -> None:
        spec = self.cluster["spec"]
        head = spec["headGroupSpec"]["rayStartParams"]
        options = [word for k, v in head.items() for word in (f"--{k}", v)]
        common = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        common += ["--node-ip-address", "127.0.0.1", "--object-store-memory", "100000000"]
        group = spec["workerGroupSpecs"][0]
        requested = group["template"]["spec"]["containers"][0]["resources"]["requests"]
        where = ["--head", "--port", str(self.port), "--temp-dir", self.sockets.name]
        node = ["--address", f"127.0.0.1:{self.port}", "--num-cpus", requested["cpu"]]
        # The node tries until its head is there, as KubeRay's waits.
        again = 'until "$@"; do sleep 1; done'
        for words in ([*common, *where, *options], ["sh", "-c", again, "sh", *common, *node]):
            started = subprocess.Popen(
                words, env=self.variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            self.processes.append(started)

    def stop(self) -> None:
        for process in self.processes:
            with suppress(psutil.Error):
                one = psutil.Process(process.pid)
                for each in [*one.children(recursive=True), one]:
                    with suppress(psutil.Error):
                        each.kill()
            process.wait()
        self.processes = []

    def run(self, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
        bin_folder = folder / "bin"
        bin_folder.mkdir(exist_ok=True)
        ray = bin_folder / "ray"
        ray.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ray.scripts.scripts "$@"\n')
        ray.chmod(0o755)
        given = {
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "POSTTRAIN_KUBERNETES_API": f"http://127.0.0.1:{self.server.server_port}",
            "POSTTRAIN_SERVICE_ACCOUNT": str(self.account),
            "POSTTRAIN_RAY_HOST": "127.0.0.1",
            "POSTTRAIN_RAY_PORT": str(self.port),
            "POD_NAME": "run-x7k2p",
            "POD_UID": "0f5c3f0e-6f4e-4c8f-9f43-7f2a4b8f7a10",
            "IMAGE": "registry/posttrain:1",
            "TOKEN_SECRET": "posttrain-ray",
            "STORE_SECRET": "posttrain-store",
            "WORKERS": "1",
            "WORKER_CPUS": "2",
            "WORKER_MEMORY": "4Gi",
            "WORKER_GPUS": "0",
        }
        return subprocess.run(
            [sys.executable, str(SCRIPT), *command],
            env=self.variables | given,
            capture_output=True,
            text=True,
            timeout=300,
        )

    def close(self) -> None:
        self.stop()
        self.server.shutdown()
        self.sockets.cleanup()


@pytest.fixture
def kubernetes(tmp_path: Path) -> Iterator[FakeKubernetes]:
    made = FakeKubernetes(tmp_path)
    yield made
    made.close()


@pytest.mark.slow
def test_a_command_finds_its_cluster_which_is_removed_after_it(
    kubernetes: FakeKubernetes, tmp_path: Path
) -> None:
    made = tiny_config(make_tiny_model(tmp_path / "model"))
    changed = {
        "stages": {"sft": made["stages"]["sft"]},
        "cluster": {"ray": {"address": "env"}},
        "limits": made["limits"] | {"learner_ranks": 2},
    }
    config = write_config(tmp_path / "run.yaml", made | changed)
    # The node has joined when the file is there: `plan` looks once.
    wait = (
        "import ray, os, time; ray.init(address=os.environ['POSTTRAIN_RAY_ADDRESS'])\n"
        "while ray.cluster_resources().get('CPU') != 2: time.sleep(0.5)"
    )
    plan = (sys.executable, "-m", "posttrain.pipelines.cli", "plan", str(config), "--json")
    plan += ("--no-calibration", "--home", str(tmp_path / "home"))
    both = f'"{sys.executable}" -c "$1" && shift && "$@"'
    done = kubernetes.run(tmp_path, "sh", "-c", both, "sh", wait, *plan)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["cluster"].endswith("2 ranks of 1 CPU each: they fit"), found["cluster"]
    name = kubernetes.cluster["metadata"]["name"]
    where = "/apis/ray.io/v1/namespaces/posttrain/rayclusters"
    assert [asked[0] for asked in kubernetes.asked] == ["POST", "DELETE"]
    assert kubernetes.asked[0][1] == where
    assert kubernetes.asked[1][1].startswith(f"{where}/{name}?")
    (owner,) = kubernetes.cluster["metadata"]["ownerReferences"]
    assert owner["uid"].startswith(name.removeprefix("run-"))
    assert TOKEN not in json.dumps(kubernetes.cluster), "by reference alone"


@pytest.mark.slow  # two nodes start for it
def test_a_command_that_fails_fails_the_pod_and_the_cluster_goes(
    kubernetes: FakeKubernetes, tmp_path: Path
) -> None:
    done = kubernetes.run(tmp_path, "sh", "-c", "exit 5")
    assert done.returncode == 5, done.stdout + done.stderr
    assert [asked[0] for asked in kubernetes.asked] == ["POST", "DELETE"]


def test_a_cluster_that_is_refused_is_one_sentence(
    kubernetes: FakeKubernetes, tmp_path: Path
) -> None:
    kubernetes.refuses = True
    done = kubernetes.run(tmp_path, "true")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "the RayCluster was refused (403)" in done.stderr
    assert "worker-ray.yaml" in done.stderr
