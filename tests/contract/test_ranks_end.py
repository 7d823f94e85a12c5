"""Ranks end together: by an error, by a death, or because their caller stops."""

from __future__ import annotations

import time

import pytest

from posttrain.core.cluster.group import RankLost
from posttrain.core.errors import DataError
from posttrain.core.runtime.processes import process_start
from tests.helpers.ranks import LIGHT, nothing, started


def test_an_error_of_one_rank_is_the_caller_s(rank_kind: str) -> None:
    ranks = started(rank_kind, LIGHT)
    with pytest.raises(DataError, match="row 3 does not exist"):
        ranks.call("fail", 1, check=nothing)


def test_a_rank_that_dies_is_reported_and_takes_the_others_with_it(rank_kind: str) -> None:
    ranks = started(rank_kind, LIGHT)
    pid = ranks.call("pid", check=nothing)
    with pytest.raises(RankLost, match="the learner") as lost:
        ranks.call("die", 1, check=nothing)
    if rank_kind == "processes":
        assert "rank 1 says no more" in str(lost.value), "the log is that of the one that died"
    assert_gone(pid)
    assert ranks.folder is None or not ranks.folder.exists()


def test_a_stop_ends_them(rank_kind: str) -> None:
    ranks = started(rank_kind, LIGHT)
    pid = ranks.call("pid", check=nothing)

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ranks.call("wait", 5.0, check=stop)
    ranks.close()
    assert_gone(pid)


def assert_gone(pid: int) -> None:
    deadline = time.monotonic() + 20
    while process_start(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not process_start(pid)
