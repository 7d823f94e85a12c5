"""Mutated configs and data files through `validate`: refused in a sentence, or accepted."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
from typer.testing import CliRunner

from posttrain.core import plugin_manager
from posttrain.pipelines.cli.main import app
from tests.helpers.fuzz import Case, config_cases, data_cases
from tests.helpers.plugins import MANAGER

SECONDS = 20
"""Far above what any case takes, and far below a hang."""


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory; the plugins are loaded once, not once a case."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plugin_manager, "PluginManager", lambda: MANAGER)
    return tmp_path


@contextlib.contextmanager
def bounded(seconds: int) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"no answer in {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def faults_of(cases: Iterator[Case]) -> list[str]:
    """What is wrong with the answer to each case, and what the case was.

    Cases that were accepted are listed in accepted.txt, for people: each should mean something.
    """
    faults = []
    for case in cases:
        began = time.monotonic()
        with bounded(SECONDS):
            result = CliRunner().invoke(app, ["validate", *case.arguments, "--home", "home"])
        took = time.monotonic() - began
        output = result.output
        if result.exit_code == 0:
            with Path("accepted.txt").open("a", encoding="utf-8", errors="replace") as listed:
                listed.write(f"{case.what}\n")
        if result.exit_code not in (0, 2, 3, 4):
            faults.append(f"{case.what}: exit code {result.exit_code}: {output[-300:]}")
        elif "Traceback" in output or "unexpected" in output:
            faults.append(f"{case.what}: {output[-300:]}")
        elif (result.exit_code != 0) != (result.stderr.count("error: ") >= 1):
            faults.append(f"{case.what}: {result.stderr.count('error: ')} errors: {output[-300:]}")
        elif max(map(len, output.splitlines()), default=0) > 1500:
            faults.append(f"{case.what}: a line of {max(map(len, output.splitlines()))} characters")
        elif took > SECONDS:
            faults.append(f"{case.what}: {took:.0f} s")
        elif Path("home").exists():
            faults.append(f"{case.what}: something was written")
    return faults


@pytest.mark.parametrize(
    ("cases", "count"),
    [
        (config_cases, 60),
        (data_cases, 40),
        pytest.param(config_cases, 500, marks=pytest.mark.slow),
        pytest.param(data_cases, 200, marks=pytest.mark.slow),
    ],
)
def test_bad_input_is_refused_in_a_sentence(
    in_folder: Path, cases: Callable[[Path, int], Iterator[Case]], count: int
) -> None:
    faults = faults_of(cases(in_folder, count))
    assert not faults, "\n".join([f"{len(faults)} of {count}:", *faults])


def test_the_installed_command_ends_on_pipes_and_bombs(tmp_path: Path) -> None:
    pipe, bomb = tmp_path / "pipe.yaml", tmp_path / "bomb.yaml"
    os.mkfifo(pipe)
    levels = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
    bomb.write_text(f"a0: &a0 [x]\n{levels}")
    for path, says in ((pipe, "is a named pipe"), (bomb, "values once its aliases")):
        done = subprocess.run(
            [sys.executable, "-m", "posttrain.pipelines.cli", "run", str(path)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 2, done.stderr
        assert says in done.stderr and "Traceback" not in done.stderr
