"""The GPU benchmark's script runs, on a tiny model, where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.gpu import mfu


def test_the_tiny_run_gives_every_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    clock = iter(range(1, 100))
    took: list[float] = []

    def timed(work: Callable[[], object], device: torch.device) -> float:
        work()
        took.append(float(next(clock)))
        return took[-1]

    monkeypatch.setattr(mfu, "seconds_of", timed)
    found = mfu.measure(mfu.parse(["--tiny", "--dtype", "float32", "--peak-tflops", "2e-6"]))
    assert took == [1.0, 2.0]  # the first update warms up
    # 2 prompts x 2 responses x 6 tokens; 2 seconds; a peak of 2e6 FLOP/s.
    assert found["response_tokens"] == 24
    assert found["mfu"] == pytest.approx(6.0 * int(str(found["parameters"])) * 24 / 2 / 2e6)
    assert 0 < float(str(found["mfu_stream"]))
    assert found["response_tokens_per_s"] == 12
    assert found["times_trl"] is None


def test_the_whole_model_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no CUDA device; --tiny"):
        mfu.measure(mfu.parse([]))
