"""The heap is trimmed after a step that left more than steps need, and only then."""

from __future__ import annotations

import mmap
import sys

import pytest

from posttrain.core.runtime import heap

GB = 10**9


def trims(monkeypatch: pytest.MonkeyPatch, resident: list[int]) -> list[bool]:
    """Whether each step was followed by a trim, for the resident sizes they end with."""
    happened: list[bool] = []
    sizes = iter(resident)
    monkeypatch.setattr(heap, "resident_bytes", lambda: next(sizes))
    monkeypatch.setattr(heap, "trim_heap", lambda: happened.append(True))
    steps = heap.StepHeap()
    found = []
    for _ in resident:
        happened.clear()
        steps.step_done()
        found.append(bool(happened))
    return found


def test_steps_of_one_size_keep_their_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trims(monkeypatch, [3 * GB, 3 * GB, int(3.2 * GB)]) == [False, False, False]


def test_a_heap_that_grew_by_holes_is_trimmed_each_time_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grown = [3 * GB, 3 * GB, 4 * GB, 3 * GB, 4 * GB]
    assert trims(monkeypatch, grown) == [False, False, True, False, True]


def test_steps_that_need_more_are_believed_after_one_trim(monkeypatch: pytest.MonkeyPatch) -> None:
    grown = [3 * GB, 3 * GB, 5 * GB, 5 * GB, 5 * GB]
    assert trims(monkeypatch, grown) == [False, False, True, False, False]


def test_the_second_step_may_need_more_than_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trims(monkeypatch, [3 * GB, 4 * GB, 4 * GB]) == [False, False, False]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_resident_memory_follows_a_buffer() -> None:
    before = heap.resident_bytes()
    # A map of its own: the allocator may have freed memory at hand, which is resident already.
    with mmap.mmap(-1, 200_000_000) as buffer:
        buffer.write(b"1" * len(buffer))
        assert heap.resident_bytes() - before > 0.9 * len(buffer)
