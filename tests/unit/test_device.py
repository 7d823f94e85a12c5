"""What the runtime does to the process that holds a run."""

from __future__ import annotations

import gc

import pytest

from posttrain.core.runtime.device import sparing_what_is_loaded


class Ring:
    """Garbage that only a collection finds."""

    alive = 0

    def __init__(self) -> None:
        self.itself = self
        Ring.alive += 1

    def __del__(self) -> None:
        Ring.alive -= 1


def test_collections_spare_what_is_loaded_and_find_what_a_run_leaves() -> None:
    before = gc.get_freeze_count()
    with pytest.raises(ZeroDivisionError), sparing_what_is_loaded():
        assert gc.get_freeze_count() > before + 10_000, "this process has imported torch"
        Ring()
        gc.collect()
        assert Ring.alive == 0
        raise ZeroDivisionError
    assert gc.get_freeze_count() == 0
