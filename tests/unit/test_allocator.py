"""Commands that compute start themselves again under tcmalloc, once, and hand it to nobody else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.core.runtime import startup as allocator
from posttrain.core.runtime.startup import find_allocator, preloaded, use_allocator

PROGRAM = """
import os, sys
print("before", os.getpid(), flush=True)
from posttrain.core.runtime.startup import is_used, release_free_memory, use_allocator
from posttrain.core.runtime.heap import trim_heap
use_allocator(sys.argv[1:])
mapped = "tcmalloc" in open("/proc/self/maps").read()
print("after", os.getpid(), is_used(), mapped, release_free_memory(), sys.argv[1:])
print("given", os.environ.get("LD_PRELOAD", "nothing"))
trim_heap()
"""
INSTALLED = find_allocator() is not None
needs_it = pytest.mark.skipif(
    not INSTALLED, reason="not installed: apt-get install libtcmalloc-minimal4"
)


def lines(tmp_path: Path, *arguments: str, **environment: str) -> list[str]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    plain = {k: v for k, v in os.environ.items() if k != allocator.CHOICE}
    done = subprocess.run(
        [sys.executable, str(program), *arguments],
        env=plain | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert not done.stderr
    return done.stdout.splitlines()


@needs_it
def test_a_run_has_it_and_what_it_starts_does_not(tmp_path: Path) -> None:
    first, again, after, given = lines(tmp_path, "run", "quick start", "--set", "a=b")
    assert first == again, "the same process, begun twice"
    pid = first.split()[1]
    assert after == f"after {pid} True True True ['run', 'quick start', '--set', 'a=b']"
    assert given == "given nothing"


@needs_it
def test_what_was_preloaded_before_stays(tmp_path: Path) -> None:
    other = next(Path("/usr/lib").glob("*-linux-gnu/libutil.so.1"), None)
    if other is None:
        pytest.skip("no library to preload")
    assert lines(tmp_path, "run", LD_PRELOAD=str(other))[-1] == f"given {other}"


@pytest.mark.parametrize(
    "command", [["doctor"], ["--help"], pytest.param([], marks=pytest.mark.slow)], ids=str
)
def test_other_commands_keep_the_system_s(tmp_path: Path, command: list[str]) -> None:
    first, after, _ = lines(tmp_path, *command)
    assert after == f"after {first.split()[1]} False False False {command}"


def test_it_can_be_refused(tmp_path: Path) -> None:
    first, after, _ = lines(tmp_path, "run", POSTTRAIN_ALLOCATOR="system")
    assert after == f"after {first.split()[1]} False False False ['run']"


def test_where_it_is_not_installed_nothing_is_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "_FOLDERS", ("no/such/folder",))
    assert find_allocator() is None and preloaded({}) == {}
    monkeypatch.delenv(allocator.CHOICE, raising=False)
    use_allocator(["run"])  # would not return


@needs_it
def test_an_allocator_of_the_user_s_stays() -> None:
    assert preloaded({"LD_PRELOAD": "/opt/libjemalloc.so.2"}) == {}
    both = preloaded({"LD_PRELOAD": "/opt/other.so"})["LD_PRELOAD"]
    assert both == f"{find_allocator()} /opt/other.so"
