"""Whole runs on a cluster of three nodes, one of them spare: each fault, and the same weights."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.cluster import (
    Cluster,
    ended,
    gone,
    rl_config,
    run_here,
    running_cluster,
    weights,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("shared_prefect"),
    pytest.mark.skipif(
        find_spec("ray") is None, reason="Ray is not installed: pip install 'posttrain[ray]'"
    ),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster") / "home", nodes=3) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rl_config(tmp_path_factory.mktemp("config"), steps=40)  # as long as a drain takes


@pytest.fixture(scope="module")
def undisturbed(config: Path) -> str:
    """The weights of the same run with two ranks of this machine."""
    return weights(run_here(config))


def test_a_run_that_is_killed_ends_its_ranks_and_the_same_command_goes_on(
    cluster: Cluster, config: Path, undisturbed: str, tmp_path: Path
) -> None:
    process, home = cluster.start(config, tmp_path / "home"), tmp_path / "home"
    ranks = cluster.actors()
    assert len(ranks) == 2
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    gone(ranks, 30)
    again = cluster.run_again(config, home)
    assert again.code == 0, again.text
    assert again.result["stages"]["rl"]["status"] == "resumed"
    assert weights(again.result) == undisturbed


def test_a_run_goes_on_with_a_spare_node_in_the_place_of_one_that_ends(
    cluster: Cluster, config: Path, undisturbed: str, tmp_path: Path
) -> None:
    process = cluster.start(config, tmp_path / "home")
    number = _other_node(cluster)
    cluster.end_node(number)
    done = ended(process)
    assert done.code == 0, done.text
    assert done.result["stages"]["rl"]["status"] == "resumed"
    assert any("goes on from its last checkpoint" in text for text in done.result["warnings"])
    assert weights(done.result) == undisturbed
    cluster.up()


def test_a_run_writes_a_checkpoint_and_moves_when_a_node_is_asked_to_leave(
    cluster: Cluster, config: Path, undisturbed: str, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    process = cluster.start(config, home)
    number = _other_node(cluster)
    cluster.drain(_node_id(cluster, number))
    done = ended(process)
    assert done.code == 0, done.text
    asked = [text for text in done.result["warnings"] if "were asked to leave the cluster" in text]
    assert len(asked) == 1 and "a checkpoint was written after step" in asked[0], done.text
    assert weights(done.result) == undisturbed
    cluster.end_node(number)  # its machine is taken away
    cluster.up()


def test_a_run_whose_head_ends_says_so_and_goes_on_when_the_cluster_is_back(
    cluster: Cluster, config: Path, undisturbed: str, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    process = cluster.start(config, home)
    ranks = cluster.actors()
    cluster.end_node(0)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 4, out
    assert "the head of the Ray cluster at" in out and "Traceback" not in out, out
    gone(ranks, 60)
    cluster.up()
    again = cluster.run_again(config, home)
    assert again.code == 0, again.text
    assert again.result["stages"]["rl"]["status"] == "resumed"
    assert weights(again.result) == undisturbed


def _other_node(cluster: Cluster) -> int:
    """A node with a rank that is not the head."""
    return max(cluster.node_of(rank) for rank in cluster.actors())


def _node_id(cluster: Cluster, number: int) -> str:
    """Ray's name of a node, as in the commands of its processes."""
    for one in cluster.process_of(number).children(recursive=True):
        for word in one.cmdline():
            if word.startswith("--node_id="):
                return word.removeprefix("--node_id=")
    raise AssertionError(f"node {number} has no raylet")
