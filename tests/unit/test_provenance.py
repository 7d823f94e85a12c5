"""Which commit runs: that of the package's own checkout, and no other's."""

from __future__ import annotations

import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

from posttrain.core.store.provenance import code_commit, environment_lock, source_tags


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    command = ["git", "-C", str(folder), *who, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "__init__.py").write_text("")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def test_the_commit_and_whether_files_differ_from_it(checkout: Path) -> None:
    head = git(checkout, "rev-parse", "HEAD")
    found = code_commit.__wrapped__(checkout)
    assert found is not None and (found.id, found.changed) == (head, False)
    (checkout / "notes.txt").write_text("not tracked")
    assert not code_commit.__wrapped__(checkout).changed
    (checkout / "core" / "__init__.py").write_text("changed = 1\n")
    assert code_commit.__wrapped__(checkout).changed


def test_an_environment_inside_somebody_elses_checkout_has_no_commit(checkout: Path) -> None:
    package = checkout / ".venv" / "posttrain"
    (package / "core").mkdir(parents=True)
    (package / "core" / "__init__.py").write_text("")
    assert code_commit.__wrapped__(package) is None


def test_without_git_there_is_no_commit_and_the_run_goes_on(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(checkout))
    assert code_commit.__wrapped__(checkout) is None


def test_the_lock_names_every_package_once_in_order() -> None:
    lines = environment_lock().splitlines()
    assert f"torch=={version('torch')}" in lines and f"posttrain=={version('posttrain')}" in lines
    names = [line.split("==")[0].lower() for line in lines]
    assert names == sorted(names) and len(set(names)) == len(names)


def test_tags_are_those_that_mlflow_shows() -> None:
    found = source_tags()
    assert found["mlflow.source.name"] == "posttrain" and found["mlflow.source.type"] == "LOCAL"
    assert all(name.startswith("mlflow.") and value for name, value in found.items())
