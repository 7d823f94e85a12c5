"""Commands that begin with the libraries loaded are commands like those that users start."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.helpers.pipeline import WARM, run_loaded, run_whole


def test_a_loaded_command_ends_as_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("name: mine\nstages: {sft: {kind: sfd}}\n")
    for arguments in (("validate", "run.yaml"), ("run", "none.yaml", "--json")):
        loaded, whole = run_loaded(*arguments), run_whole(*arguments)
        assert (loaded.code, loaded.text) == (whole.code, whole.text)
    assert WARM, "the first ones had libraries loaded"


def test_one_that_takes_too_long_is_killed_and_the_next_runs() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run_loaded("--version", timeout=0)
    assert run_loaded("--version").code == 0


def test_variables_for_libraries_need_an_interpreter_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('found')")
    assert "found" not in run_loaded("--version").text
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert "found" in run_loaded("--version").text
