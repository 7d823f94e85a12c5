"""A cluster of several nodes on this machine, what a fault does to it, and what it leaves."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.runtime.processes import free_ports
from posttrain.pipelines.services.processes import marked
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

RANKS = ("--set", "limits.learner_ranks=2")


@dataclass(frozen=True)
class Cluster:
    """A cluster of nodes, and how runs of other homes get there."""

    home: Path
    port: int
    nodes: int = 2
    cpus: int = 1

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def token(self) -> Path:
        return self.home / "cluster" / "token"

    @property
    def given(self) -> tuple[str, ...]:
        return (*RANKS, "--set", f"cluster.ray.address={self.address}")

    @property
    def variables(self) -> dict[str, str]:
        return {"RAY_AUTH_TOKEN_PATH": str(self.token)}

    def change(self, *command: str) -> Finished:
        return run_command("cluster", *command, "--home", str(self.home), "--json")

    def up(self) -> None:
        """Start what does not run."""
        shape = ("--nodes", str(self.nodes), "--cpus", str(self.cpus))
        done = self.change("up", *shape, "--port", str(self.port))
        assert done.code == 0 and len(done.result["nodes"]) == self.nodes, done.text

    def run(self, config: Path, home: Path, *more: str) -> Finished:
        given = (*self.given, *more, "--home", str(prepared(home)), "--json")
        return run_command("run", str(config), *given, variables=self.variables)

    def run_again(self, config: Path, home: Path) -> Finished:
        """The same command in a home that it has begun in."""
        given = (*self.given, "--home", str(home), "--json")
        return run_command("run", str(config), *given, variables=self.variables)

    def start(self, config: Path, home: Path) -> subprocess.Popen[str]:
        """A run that has recorded its third step."""
        given = (*self.given, "--home", str(prepared(home)), "--json")
        process = start_command("run", str(config), *given, variables=self.variables)
        wait_for_step(home, 3, process)
        return process

    def processes(self) -> list[psutil.Process]:
        """All that its nodes have started, whoever their parents are by now."""
        return marked(self.home / "cluster")

    def actors(self) -> list[psutil.Process]:
        """The processes of its ranks."""
        return [one for one in self.processes() if _command(one).startswith("ray::RankActor")]

    def end_node(self, number: int) -> None:
        """All processes of a node at once, as when its machine is gone."""
        node = self.process_of(number)
        for one in [*node.children(recursive=True), node]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs([node], timeout=10)

    def process_of(self, number: int) -> psutil.Process:
        """What runs as a node."""
        record = self.home / "cluster" / "running" / f"node-{number}.json"
        return psutil.Process(json.loads(record.read_text())["pid"])

    def node_of(self, process: psutil.Process) -> int:
        """The number of the node that has started this process."""
        above = {one.pid for one in process.parents()}
        for number in range(self.nodes):
            record = self.home / "cluster" / "running" / f"node-{number}.json"
            if record.exists() and json.loads(record.read_text())["pid"] in above:
                return number
        raise AssertionError(f"{process} is on no node")

    def drain(self, node_id: str) -> None:
        """Tell a node that it will be gone in a minute."""
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "drain-node"),
            *("--address", self.address, "--node-id", node_id),
            *("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "for a test"),
            *("--deadline-remaining-seconds", "60"),
        ]
        subprocess.run(
            command,
            check=True,
            timeout=60,
            capture_output=True,
            env=environment() | self.variables | {"RAY_AUTH_MODE": "token"},
        )


def rl_config(folder: Path, steps: int) -> Path:
    """A config that trains a tiny model by reinforcement learning, and its checkpoints."""
    made: dict[str, Any] = tiny_config(make_tiny_model(folder / "model"))
    rl = made["stages"]["rl"] | {
        "inputs": {"model": "base"},
        "rewards": ["accuracy"],
        "steps": steps,
        "checkpoint_every": 2,
        "evaluate_every": 0,
    }
    return write_config(folder / "run.yaml", made | {"stages": {"rl": rl}})


def run_here(config: Path) -> dict[str, Any]:
    """The result of the run with two ranks of this machine, without any cluster."""
    home = prepared(config.parent / "local")
    done = run_command("run", str(config), *RANKS, "--home", str(home), "--json")
    assert done.code == 0, done.text
    return done.result


def trained(result: dict[str, Any]) -> dict[str, Any]:
    """The artifact of the trained model."""
    made = result["stages"]["rl"]["artifacts"]
    return next(a for a in made if a["kind"] == "model")


def weights(result: dict[str, Any]) -> str:
    """The digest of the trained model."""
    return str(trained(result)["digest"])


def ended(process: subprocess.Popen[str]) -> Finished:
    """A started command, once it has ended."""
    out, _ = process.communicate(timeout=240)
    return Finished(process.returncode, out, json.loads(out.strip().splitlines()[-1]))


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@contextlib.contextmanager
def running_cluster(home: Path, nodes: int = 2, cpus: int = 1) -> Iterator[Cluster]:
    """A cluster that ends with the block, and leaves nothing."""
    (port,) = free_ports(1)
    cluster = Cluster(home, port, nodes, cpus)
    cluster.up()
    try:
        yield cluster
    finally:
        done = cluster.change("down")
    assert done.code == 0, done.text
    assert not cluster.processes(), "nothing of it is left"


def gone(processes: list[psutil.Process], within_s: float) -> float:
    """Seconds until none of them runs."""
    began = time.monotonic()
    _, alive = psutil.wait_procs(processes, timeout=within_s)
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE], alive
    return time.monotonic() - began
