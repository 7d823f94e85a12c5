"""What is taken for the time of a piece of work on a machine that others use too."""

from __future__ import annotations

import pytest
import torch

from posttrain.core.costs import stopwatch
from posttrain.core.costs.stopwatch import MOST_RUNS, Stopwatch


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([1.0, 1.1], 1.05),
        ([9.0, 1.0, 1.1], 1.05),  # the first warms up
        ([1.0, 2.0, 2.2], 2.1),  # not the quickest: that others wait is how this machine is
        ([9.0, 1.0, 2.0, 3.0, 5.0], 2.5),  # no two agree
    ],
)
def test_a_time_is_what_two_runs_tell_one_after_the_other_or_the_median(
    monkeypatch: pytest.MonkeyPatch, runs: list[float], expected: float
) -> None:
    now, left = [0.0], list(runs)

    def work() -> None:
        now[0] += left.pop(0)

    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: now[0])
    found = Stopwatch(torch.device("cpu"), 0).typical(work)
    assert found == pytest.approx(expected)
    assert not left and len(runs) <= MOST_RUNS
