"""Sampling next to the update: what it gains, and that it ends as quickly as any run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.overlap import measure


@pytest.mark.slow
@pytest.mark.alone
def test_sampling_beside_the_update_gives_1_6_times_the_steps_per_hour(tmp_path: Path) -> None:
    """With an engine and an update that take as long as each other, on resources of their own."""
    found = measure(tmp_path, 1.0, 6, ("staleness0", "staleness1"))
    assert found["staleness0"]["step_s"] >= 2.0, "one after the other"
    assert found["staleness1"]["staleness_max"] == 1
    assert found["speedup"] >= 1.6, found
