"""Run a command on a Ray cluster of its own: `python with_ray.py COMMAND...`, in a pod.

The cluster (ray-cluster.yaml) is made through Kubernetes' API for KubeRay, with this pod as its
owner. The pod joins it as a node without CPUs, since `posttrain run` has to be on one; the command
finds the address in POSTTRAIN_RAY_ADDRESS. Whatever ends the command, the cluster is removed.
"""

from __future__ import annotations

import os
import signal
import socket
import string
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import yaml

PORT = int(os.environ.get("POSTTRAIN_RAY_PORT", "6379"))
STARTED = "Ray runtime started"
ATTEMPTS = 3


class Kubernetes:
    """The API server, as the pod's service account."""

    def __init__(self) -> None:
        folder = "/var/run/secrets/kubernetes.io/serviceaccount"
        account = Path(os.environ.get("POSTTRAIN_SERVICE_ACCOUNT", folder))
        host = os.environ.get("KUBERNETES_SERVICE_HOST", "kubernetes.default.svc")
        port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        url = os.environ.get("POSTTRAIN_KUBERNETES_API", f"https://{host}:{port}")
        self.namespace = (account / "namespace").read_text().strip()
        token = (account / "token").read_text().strip()
        certificate = account / "ca.crt"
        self._client = httpx.Client(
            base_url=f"{url}/apis/ray.io/v1/namespaces/{self.namespace}",
            headers={"Authorization": f"Bearer {token}"},
            verify=str(certificate) if certificate.is_file() else True,
            timeout=30.0,
        )

    def create(self, cluster: dict[str, Any]) -> None:
        answer = self._client.post("/rayclusters", json=cluster)
        if answer.status_code == 404:
            raise SystemExit("error: this Kubernetes has no RayCluster: install KubeRay's operator")
        if answer.is_error:
            why = " ".join(answer.text.split())[:300]
            raise SystemExit(
                f"error: the RayCluster was refused ({answer.status_code}): {why}; worker-ray.yaml "
                "has the role that is needed"
            )

    def delete(self, name: str) -> None:
        """Failing that, it goes with this pod."""
        try:
            self._client.delete(f"/rayclusters/{name}", params={"propagationPolicy": "Foreground"})
        except httpx.HTTPError as error:
            print(f"the RayCluster {name} was not removed ({error}): it goes with this pod")


def cluster_of(kubernetes: Kubernetes, name: str) -> dict[str, Any]:
    """The RayCluster to make, its variables filled in from this process's environment."""
    own = Path(__file__).with_name("ray-cluster.yaml")
    path = Path(os.environ.get("POSTTRAIN_RAY_CLUSTER", own))
    given = {"CLUSTER": name, "NAMESPACE": kubernetes.namespace}
    try:
        text = string.Template(path.read_text()).substitute(os.environ | given)
    except KeyError as error:
        raise SystemExit(f"error: {path} names {error}, which is not in the environment") from error
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def wait_for(host: str, seconds: float) -> None:
    """Until the head listens."""
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, PORT), 5).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise SystemExit(
                    f"error: no head of the Ray cluster answers at {host}:{PORT} after "
                    f"{seconds:.0f} s ({error}): `kubectl describe raycluster` says why"
                ) from error
            time.sleep(1)


def joined(address: str) -> subprocess.Popen[str]:
    """`ray start` in this pod, once it is a node; Ray gives up on a node that starts slowly."""
    for _ in range(ATTEMPTS):
        node = started(address, said := [])
        if node is not None:
            return node
    raise SystemExit(f"error: this pod did not join {address}: {''.join(said)[-500:]}")


def started(address: str, said: list[str]) -> subprocess.Popen[str] | None:
    """None if it ended before this pod was a node; `said` has what it wrote."""
    command = ["ray", "start", "--address", address, "--num-cpus", "0", "--num-gpus", "0"]
    node = subprocess.Popen(
        [*command, "--block", "--disable-usage-stats"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},  # or what it says comes when it ends
    )
    assert node.stdout is not None
    for line in node.stdout:
        said.append(line)
        if STARTED in line:
            threading.Thread(target=node.stdout.read, daemon=True).start()  # so that it can write
            return node
    node.wait()
    return None


def run(command: list[str]) -> int:
    """The command's exit code; signals are its own to see."""
    child = subprocess.Popen(command)

    def pass_on(number: int, frame: FrameType | None) -> None:
        child.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    code = child.wait()
    return 128 - code if code < 0 else code


def stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main(command: list[str]) -> int:
    if not command:
        raise SystemExit("error: expected a command, such as `posttrain run quickstart`")
    signal.signal(signal.SIGTERM, stop)  # before the command runs, too, the cluster is removed
    kubernetes = Kubernetes()
    name = f"run-{os.environ['POD_UID'][:13]}"
    host = os.environ.get("POSTTRAIN_RAY_HOST", f"{name}-head-svc.{kubernetes.namespace}.svc")
    seconds = float(os.environ.get("POSTTRAIN_START_SECONDS", "900"))
    kubernetes.create(cluster_of(kubernetes, name))
    node = None
    try:
        wait_for(host, seconds)
        os.environ["POSTTRAIN_RAY_ADDRESS"] = f"{host}:{PORT}"
        node = joined(os.environ["POSTTRAIN_RAY_ADDRESS"])
        return run(command)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if node is not None:
            node.terminate()
            node.wait()
        kubernetes.delete(name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
