"""A whole node is lost while it scores and answers: every sample keeps its score, every call its
answer."""

from __future__ import annotations

import threading
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.contract.test_environment_nodes import called, here, texts
from tests.contract.test_environment_nodes import on_nodes as answered_on_nodes
from tests.contract.test_score_pools import TEXTS, assert_own, local_pool, on_nodes, score
from tests.helpers.two_nodes import joined, two_nodes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("ray") is None, reason="Ray is not installed: pip install 'posttrain[ray]'"
    ),
]


def test_what_a_lost_node_had_is_done_elsewhere(tmp_path: Path) -> None:
    warnings: list[str] = []
    told: list[str] = []
    with two_nodes(tmp_path) as cluster, joined(cluster):
        scorer = on_nodes(local_pool(work_s=0.02), warnings)
        answers = answered_on_nodes(here(seconds=0.5), told)
        with scorer, answers:
            score(scorer, ["1"] * 8)
            found: list[str] = []

            def answer() -> None:
                found.extend(texts(answers.to(called(TEXTS))))

            thread = threading.Thread(target=answer)
            threading.Timer(0.3, cluster.kill_node, [1]).start()
            thread.start()
            assert_own(score(scorer, TEXTS))
            thread.join()
            assert found == [text * 2 for text in TEXTS]
            assert any("was lost" in text for text in warnings), warnings
            assert any("was lost" in text for text in told), told
            assert not any("own" in text for text in warnings + told)


def test_without_any_node_left_this_machine_does_it(tmp_path: Path) -> None:
    with two_nodes(tmp_path, cpus=1) as cluster, joined(cluster):
        warnings: list[list[str]] = [[], []]
        pools = [on_nodes(local_pool(work_s=0.01), w, nodes=1) for w in warnings]
        with pools[0], pools[1]:  # one on each node, which is full then
            threading.Timer(0.5, cluster.kill_node, [1]).start()
            threads = [threading.Thread(target=score, args=(p, ["1"] * 400)) for p in pools]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for pool in pools:
                assert_own(score(pool, TEXTS))
        said = [[text for text in w if "own machine" in text] for w in warnings]
        assert sorted(map(len, said)) == [0, 2], said
        assert "no node of the cluster is left" in max(said)[0]
