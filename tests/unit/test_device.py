"""How many CPU threads a run takes."""

from __future__ import annotations

import os

import pytest

from posttrain.core.models.device import cpu_threads

CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("configured", "variable", "threads"),
    [
        (3, "1", 3),
        (0, "1", 1),
        (0, "7,2", 7),
        (0, None, CORES),
        (0, "", CORES),
        (0, "0", CORES),
        (0, "-2", CORES),
        (0, "many", CORES),
    ],
)
def test_the_config_decides_then_openmp_s_variable_then_the_cores(
    monkeypatch: pytest.MonkeyPatch, configured: int, variable: str | None, threads: int
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert cpu_threads(configured) == threads
