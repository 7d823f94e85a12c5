"""Ranks on the nodes of a Ray cluster: their gradient, and the loss of a node.

The last file of those with one cluster (`tests.helpers.order`): it ends a node. Slow tests have
ranks on Ray in all that `test_ranks` checks, and every other fault (`test_cluster_faults`).
"""

from __future__ import annotations

from posttrain.core.cluster.group import RankLost
from tests.helpers.ranks import WORKER, nothing
from tests.helpers.speed import Options, assert_equal_gradients, plain_gradients
from tests.helpers.two_nodes import TwoNodes


def test_ranks_on_two_nodes_take_the_plain_gradient_and_a_lost_node_is_noticed(
    nodes: TwoNodes,
) -> None:
    from tests.helpers.faults import ranks_of, struck

    whole = nodes.shape.cpus  # so each is on a node of its own
    ranks = ranks_of(2, worker=WORKER, cpus=whole)
    options = Options(packed=True, micro_batch_size=3)
    found = ranks.call("gradient", "gpt2", options, check=nothing)
    assert_equal_gradients(found, plain_gradients("gpt2", Options()))
    ranks.close()

    ranks = ranks_of(2, cpus=whole)
    error, seconds = struck(lambda: nodes.kill_node(1), ranks)
    assert isinstance(error, RankLost) and seconds < 30, (error, seconds)
    left = ranks_of(2, cpus=whole)
    assert left.size == 1
    left.close()
