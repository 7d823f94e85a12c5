"""What ranks on a cluster notice of each fault, and how soon. `tests/e2e` has whole runs."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from posttrain.core.cluster.group import RankLost
from posttrain.core.errors import ResourceError
from posttrain.core.runtime.processes import free_ports
from tests.helpers.cluster import Cluster, gone, running_cluster
from tests.helpers.network import Namespace, can_cut
from tests.helpers.ranks import LIGHT, nothing

pytestmark = pytest.mark.skipif(
    find_spec("ray") is None, reason="Ray is not installed (posttrain[ray])"
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster") / "home") as cluster:
        yield cluster


@contextlib.contextmanager
def joined(address: str, token: Path) -> Iterator[None]:
    from posttrain.core.cluster.on_ray import connection

    connection.join(address, token)
    try:
        yield
    finally:
        connection.leave()


def ranks_of(size: int, least: int = 1, **more: float) -> Any:
    """A group of the light worker that has started."""
    from posttrain.core.cluster.on_ray.ranks import RankResources, RayRanks

    limits = {"start_timeout_s": 60.0} | more
    made = RayRanks(
        size, LIGHT, {"OMP_NUM_THREADS": "1"}, RankResources(cpus=1, gpus=0, least=least, **limits)
    )
    made.start(None, nothing)
    return made


def seen_after(fault: Callable[[], object], ranks: Any, kind: type[Exception]) -> float:
    """Seconds from the fault, in the midst of updates, to the error of the caller."""
    ranks.call("update", check=nothing)
    moment: list[float] = []

    def strike() -> None:
        fault()
        moment.append(time.monotonic())

    thread = threading.Timer(0.3, strike)
    thread.start()
    with pytest.raises(kind):
        while True:
            ranks.call("update", check=nothing)
    seen = time.monotonic()
    thread.join()
    return seen - moment[0]


def test_a_node_that_is_told_to_leave_is_left_and_one_that_ends_is_noticed(
    cluster: Cluster,
) -> None:
    """A notice, and the end of a whole node; then the node is there again."""
    from posttrain.core.cluster.on_ray import connection, watch

    with joined(cluster.address, cluster.token):
        ranks = ranks_of(2)
        assert watch.leaving() == []
        (second,) = (one for one in cluster.actors() if cluster.node_of(one) == 1)
        ids = [str(node) for node in sorted(watch._watch.ours[id(ranks)])]
        assert len(ids) == 2
        import ray

        mine = ray.get_runtime_context().get_node_id()
        (other,) = (node_id for node_id in ids if node_id != mine)
        cluster.drain(other)
        time.sleep(watch.LOOK_S)
        assert watch.leaving() == [other], "the ranks still run there"
        ranks.call("update", check=nothing)
        assert len(connection.nodes()) == 1, "no room for others"
        assert seen_after(lambda: cluster.end_node(1), ranks, RankLost) < 30
        gone([second], 20)
        assert watch.leaving() == []
        alone = ranks_of(2)
        assert alone.size == 1
        alone.close()
    cluster.up()
    with joined(cluster.address, cluster.token):
        ranks = ranks_of(2, least=2)
        assert ranks.size == 2, "a node that has ended is started again"
        ranks.close()


@pytest.mark.slow
def test_a_rank_that_hangs_is_given_up(cluster: Cluster) -> None:
    with joined(cluster.address, cluster.token):
        ranks = ranks_of(2, peer_timeout_s=5.0)
        stopped = cluster.actors()[1]
        seen = seen_after(lambda: stopped.send_signal(signal.SIGSTOP), ranks, RankLost)
        assert 1 < seen < 30
        gone([stopped], 30)


@pytest.mark.slow
def test_a_head_that_ends_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    with (
        running_cluster(tmp_path / "home") as cluster,
        joined(cluster.address, cluster.token),
    ):
        ranks = ranks_of(2)
        with_it = cluster.processes()
        ranks.call("update", check=nothing)
        cluster.end_node(0)
        with pytest.raises(ResourceError, match=r"the head of the Ray cluster at .* Start the"):
            while True:
                ranks.call("update", check=nothing)
        ranks.close()
        gone(with_it, 60)


@pytest.mark.slow
@pytest.mark.skipif(not can_cut(), reason="needs root and network namespaces (`ip netns`)")
def test_a_link_that_is_cut_without_a_word_is_noticed(tmp_path: Path) -> None:
    """The other machine is a network namespace; no packet passes any more, and none says so."""
    from posttrain.core.cluster.on_ray import connection
    from posttrain.pipelines.services.cluster import HEALTH

    token, (port,) = tmp_path / "token", free_ports(1)
    connection.write_token(token)
    environment = (
        os.environ
        | HEALTH
        | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        }
    )
    sockets = Path("/tmp") / f"pt-cut-{os.getpid()}"  # noqa: S108 - paths of sockets are short
    common = ("--block", "--disable-usage-stats", "--num-cpus", "1")
    with Namespace.made() as other:
        address = f"{other.here}:{port}"
        head = ("--head", "--port", str(port), "--include-dashboard", "false")
        nodes = [
            subprocess.Popen(
                [*before, sys.executable, "-m", "ray.scripts.scripts", "start", *common, *more],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            for before, more in (
                ((), (*head, "--node-ip-address", other.here, "--temp-dir", str(sockets))),
                (other.inside, ("--address", address, "--node-ip-address", other.there)),
            )
        ]
        try:
            end = time.monotonic() + 60
            while time.monotonic() < end and not _answers(address):
                time.sleep(0.3)
            with joined(address, token):
                while time.monotonic() < end and len(connection.nodes()) < 2:
                    time.sleep(0.3)
                ranks = ranks_of(2, least=2)
                seen = seen_after(other.cut, ranks, RankLost)
                assert seen < 30, seen
                alone = ranks_of(2)
                assert alone.size == 1, "it goes on without"
                alone.close()
        finally:
            for node in nodes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(node.pid, signal.SIGTERM)
            for node in nodes:
                try:
                    node.wait(20)
                except subprocess.TimeoutExpired:
                    os.killpg(node.pid, signal.SIGKILL)
            shutil.rmtree(sockets, ignore_errors=True)


def _answers(address: str) -> bool:
    import socket

    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 1).close()
    except OSError:
        return False
    return True
