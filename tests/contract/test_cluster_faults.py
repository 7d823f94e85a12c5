"""What ranks on a cluster notice of each fault, and how soon. `tests/e2e` has whole runs."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'posttrain[ray]'")

from posttrain.core.cluster.group import RankLost  # noqa: E402
from posttrain.core.cluster.on_ray import connection, watch  # noqa: E402
from posttrain.core.errors import ResourceError  # noqa: E402
from tests.helpers.cluster import Cluster, gone, running_cluster  # noqa: E402
from tests.helpers.faults import joined, ranks_of, struck, two_machines  # noqa: E402
from tests.helpers.network import can_cut  # noqa: E402
from tests.helpers.ranks import nothing  # noqa: E402


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster") / "home") as cluster:
        yield cluster


@pytest.mark.slow
def test_a_node_that_is_asked_to_leave_is_known_and_one_that_ends_is_noticed(
    cluster: Cluster,
) -> None:
    with joined(cluster.address, cluster.token):
        ranks = ranks_of(2)
        assert watch.leaving() == []
        (second,) = (one for one in cluster.actors() if cluster.node_of(one) == 1)
        here = ray.get_runtime_context().get_node_id()
        (other,) = (node["NodeID"] for node in ray.nodes() if node["NodeID"] != here)
        cluster.drain(other)
        time.sleep(watch.LOOK_S)
        assert watch.leaving() == [other], "the ranks still run there"
        ranks.call("update", check=nothing)
        assert len(connection.nodes()) == 1, "no room for others"
        error, seconds = struck(lambda: cluster.end_node(1), ranks)
        assert isinstance(error, RankLost) and seconds < 30, (error, seconds)
        gone([second], 20)
        assert watch.leaving() == []
        alone = ranks_of(2)
        assert alone.size == 1
        alone.close()
    cluster.up()
    with joined(cluster.address, cluster.token):
        assert len(connection.nodes()) == 2, "a node that has ended is started again"


@pytest.mark.slow
def test_a_rank_that_hangs_is_given_up(cluster: Cluster) -> None:
    with joined(cluster.address, cluster.token):
        ranks = ranks_of(2, peer_timeout_s=20.0)
        stopped = cluster.actors()[1]
        error, seconds = struck(lambda: stopped.send_signal(signal.SIGSTOP), ranks)
        assert isinstance(error, RankLost) and seconds < 60, (error, seconds)
        gone([stopped], 30)


@pytest.mark.slow
def test_a_head_that_ends_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    with (
        running_cluster(tmp_path / "home") as cluster,
        joined(cluster.address, cluster.token),
    ):
        ranks = ranks_of(2)
        with_it = cluster.processes()
        error, seconds = struck(lambda: cluster.end_node(0), ranks)
        assert isinstance(error, ResourceError) and "the head of the Ray cluster at" in str(error)
        assert seconds < 30
        ranks.close()
        gone(with_it, 60)


@pytest.mark.slow
@pytest.mark.skipif(not can_cut(), reason="needs root and network namespaces (`ip netns`)")
def test_a_link_that_is_cut_without_a_word_is_noticed(tmp_path: Path) -> None:
    """The other machine is a network namespace; no packet passes any more, and none says so."""
    with two_machines(tmp_path) as cluster, joined(cluster.address, cluster.token):
        ranks = ranks_of(2, least=2)
        error, seconds = struck(cluster.cut, ranks)
        assert isinstance(error, RankLost) and seconds < 30, (error, seconds)
        alone = ranks_of(2)
        assert alone.size == 1, "it goes on without"
        alone.close()
