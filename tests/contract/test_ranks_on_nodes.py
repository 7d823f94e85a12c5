"""Ranks on the nodes of a Ray cluster: their gradient, and the loss of a node.

The last file of those with one cluster (`tests.helpers.order`): it ends a node. Slow tests have
ranks on Ray in all that `test_ranks` checks, and every other fault (`test_cluster_faults`).
"""

from __future__ import annotations

import threading
import time

import pytest

from posttrain.core.cluster.group import RankLost
from tests.helpers.ranks import WORKER, nothing
from tests.helpers.speed import Options, assert_equal_gradients, plain_gradients
from tests.helpers.two_nodes import TwoNodes


def test_ranks_on_two_nodes_take_the_plain_gradient_and_a_lost_node_is_noticed(
    nodes: TwoNodes,
) -> None:
    from tests.helpers.faults import ranks_of

    whole = nodes.shape.cpus  # so each is on a node of its own
    ranks = ranks_of(2, worker=WORKER, cpus=whole)
    options = Options(packed=True, micro_batch_size=3)
    wanted = plain_gradients("qwen3", Options())
    assert_equal_gradients(ranks.call("gradient", "qwen3", options, check=nothing), wanted)

    loss = threading.Timer(0.3, nodes.kill_node, [1])
    loss.start()
    began = time.monotonic()
    with pytest.raises(RankLost):
        while True:
            ranks.call("gradient", "qwen3", options, check=nothing)
    assert time.monotonic() - began < 30
    left = ranks_of(2, cpus=whole)
    assert left.size == 1
    left.close()
