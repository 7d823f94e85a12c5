"""How many CPU threads a run takes."""

from __future__ import annotations

import os

import pytest
import torch

from posttrain.core.models.device import cpu_threads, set_threads

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
        (0, "9" * 5000, CORES),
    ],
)
def test_the_config_decides_then_openmp_s_variable_then_the_cores(
    monkeypatch: pytest.MonkeyPatch, configured: int, variable: str | None, threads: int
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert cpu_threads(configured) == threads


def test_torch_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        for variable in ("1", "3"):
            monkeypatch.setenv("OMP_NUM_THREADS", variable)
            set_threads(0)
            assert torch.get_num_threads() == int(variable)
    finally:
        torch.set_num_threads(before)
