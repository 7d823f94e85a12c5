"""The garbage collector while a command starts and while a run works."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from posttrain.core.runtime.collector import sparing_what_is_loaded


class Ring:
    """Garbage that only a collection finds."""

    alive = 0

    def __init__(self) -> None:
        self.itself = self
        Ring.alive += 1

    def __del__(self) -> None:
        Ring.alive -= 1


def test_collections_spare_what_is_loaded_and_find_what_a_run_leaves() -> None:
    gc.unfreeze()  # the tests' own `conftest.py` has frozen what it loaded
    before = gc.get_freeze_count()
    with pytest.raises(ZeroDivisionError), sparing_what_is_loaded():
        assert gc.get_freeze_count() > before + 10_000, "this process has imported torch"
        Ring()
        gc.collect()
        assert Ring.alive == 0
        raise ZeroDivisionError
    assert gc.get_freeze_count() == 0


LOADING_AND_WORKING = """
import gc
usual = gc.get_threshold()
from posttrain.core.runtime.collector import command, loading_more, sparing_what_is_loaded
with command():
    print(gc.get_threshold()[0] > 10 * usual[0])
    with sparing_what_is_loaded():
        print(gc.get_threshold() == usual)
        spared = gc.get_freeze_count()
        for spare in (False, True):
            with loading_more(spare=spare):
                print(gc.get_threshold()[0] > 10 * usual[0])
                import decimal
            print((gc.get_freeze_count() > spared + 100) is spare)
            print(gc.get_threshold() == usual)
    print(gc.get_threshold()[0] > 10 * usual[0])
"""

ENDING = """
import atexit, sys, threading, time
from posttrain.core.runtime.collector import command
class Late:
    def __del__(self):
        print("taken apart")
kept = Late()
with command():
    atexit.register(lambda: print("exit function"))
    threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
    {end}
"""


def run_script(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)


def test_a_command_collects_seldom_until_its_run_works() -> None:
    assert run_script(LOADING_AND_WORKING).stdout.split() == ["True"] * 9


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("pass", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit()", 0, ""),
        ("raise ValueError('reported')", 1, "ValueError: reported"),
    ],
)
def test_a_command_ends_in_order_and_leaves_its_heap_to_the_kernel(
    end: str, code: int, said: str
) -> None:
    done = run_script(ENDING.format(end=end))
    assert done.returncode == code
    assert done.stdout.splitlines() == ["thread", "exit function"]
    assert said in done.stderr
