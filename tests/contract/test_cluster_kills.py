"""A sample of `tests/bench/cluster_kills.py`: ranks are killed, and the weights are the same."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'posttrain[ray]'")

from tests.helpers.cluster import running_cluster  # noqa: E402
from tests.helpers.faults import joined  # noqa: E402
from tests.helpers.kills import Tally, struck_run, undisturbed  # noqa: E402


@pytest.mark.slow
def test_a_run_that_is_struck_ends_in_the_weights_of_one_that_is_not(tmp_path: Path) -> None:
    tally = Tally()
    with (
        running_cluster(tmp_path / "home", nodes=2, cpus=2) as cluster,
        joined(cluster.address, cluster.token),
    ):
        wanted = undisturbed()
        struck_run(cluster, tmp_path / "run", 7, 2, wanted, tally)
        # A kill is asked of the node, which ends the process a moment later.
        assert not psutil.wait_procs(cluster.actors(), timeout=10)[1]
    assert sum(tally.strikes.values()) == 2 and tally.killed >= 2
    assert (tally.wrong, tally.hung, tally.errors) == (0, 0, []), tally
