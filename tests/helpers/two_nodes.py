"""A Ray cluster of two nodes on this machine, for tests that lose what is on them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from posttrain.core.runtime.processes import free_ports
from posttrain.pipelines.services.cluster import Shape, down, token_file, up


@dataclass(frozen=True)
class TwoNodes:
    """Where the cluster's files are, and what it is made of."""

    home: Path
    shape: Shape

    def actors(self) -> list[psutil.Process]:
        """The processes of pools on its nodes."""
        found = []
        for number in range(self.shape.nodes):
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [
                    process
                    for process in self._node(number).children(recursive=True)
                    if _is_actor(process)
                ]
        return found

    def _node(self, number: int) -> psutil.Process:
        record = self.home / "cluster" / "running" / f"node-{number}.json"
        return psutil.Process(json.loads(record.read_text())["pid"])

    def kill_node(self, number: int) -> None:
        """End a node and all its processes, as a machine that loses power does."""
        node = self._node(number)
        for one in [*node.children(recursive=True), node]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()


def _is_actor(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return "ray::NodeActor" in " ".join(process.cmdline())
    return False


@contextlib.contextmanager
def two_nodes(home: Path, cpus: int = 2) -> Iterator[TwoNodes]:
    """Start it, and end it."""
    (port,) = free_ports(1)
    shape = Shape(nodes=2, cpus=cpus, gpus=0, port=port)
    up(home, shape, lambda line: None)
    try:
        yield TwoNodes(home, shape)
    finally:
        down(home, lambda line: None)


@contextlib.contextmanager
def joined(cluster: TwoNodes) -> Iterator[TwoNodes]:
    """Join it with this process, and leave it."""
    from posttrain.core.cluster.on_ray import connection

    connection.join(cluster.shape.address, token_file(cluster.home))
    try:
        yield cluster
    finally:
        connection.leave()
