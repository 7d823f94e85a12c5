"""Tasksets of verifiers where the package is not: configs, and the Python that was named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain.core.config.rl_stage import RlStage
from posttrain.core.errors import ConfigError, PosttrainError, ResourceError
from posttrain.pipelines.run.checks import resolve_configs
from posttrain.pipelines.run.environment_checks import check_environments
from posttrain.plugins.tasks.verifiers import VerifiersTask, VerifiersTaskConfig
from tests.helpers.verifiers_sets import write_sums


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A virtual environment without any package."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return str(folder / "bin" / "python")


def with_version(python: str, version: str) -> Path:
    """Metadata of a release of verifiers, which is all that is read of one that is too old."""
    (site,) = Path(python).parent.parent.glob("lib/python*/site-packages")
    folder = site / f"verifiers-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: verifiers\nVersion: {version}\n"
    )
    return folder


def refused(**fields: Any) -> str:
    with pytest.raises(PosttrainError) as raised:
        VerifiersTask(VerifiersTaskConfig(**fields))
    assert "\n" not in str(raised.value) and "Traceback" not in str(raised.value)
    return str(raised.value)


def test_a_python_that_is_not_there_is_named_with_what_to_do(tmp_path: Path) -> None:
    path = str(write_sums(tmp_path))
    said = refused(python=str(tmp_path / "venv"), path=path)
    assert f"there is no Python '{tmp_path / 'venv'}'" in said and "pip install" in said
    (tmp_path / "venv").mkdir()
    assert "venv/bin/python'" in refused(python=str(tmp_path / "venv"), path=path)


def test_a_python_without_verifiers_says_how_to_install_it(
    bare_python: str, tmp_path: Path
) -> None:
    said = refused(python=bare_python, path=str(write_sums(tmp_path)))
    assert "bin/python does not have verifiers" in said and "verifiers>=0.4,<0.5" in said


def test_an_old_verifiers_is_named_with_its_version(bare_python: str, tmp_path: Path) -> None:
    folder = with_version(bare_python, "0.1.10")
    said = refused(python=bare_python, path=str(write_sums(tmp_path)), taskset="sums")
    (folder / "METADATA").unlink()
    folder.rmdir()
    assert "has verifiers 0.1.10, whose API (load_environment, Rubric)" in said


def test_paths_and_variables_that_are_not_there(bare_python: str, tmp_path: Path) -> None:
    assert "there is no 'no.py'; correct `path`" in refused(python=bare_python, path="no.py")
    said = refused(python=bare_python, taskset="sums", pass_env=("NO_SUCH_VARIABLE",))
    assert "['NO_SUCH_VARIABLE'], which are not set" in said


def test_a_program_that_does_not_answer_is_ended(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 100\n")
    program.chmod(0o755)
    with pytest.raises(ResourceError, match="not listed within 0.3 s"):
        VerifiersTask(VerifiersTaskConfig(python=str(program), taskset="sums", start_s=0.3))
    program.write_text("#!/bin/sh\necho no licence; exit 3\n")
    assert "ended with exit code 3: no licence" in refused(python=str(program), taskset="sums")


def run_of(tmp_path: Path, task: dict[str, Any], environment: dict[str, Any]) -> Path:
    stage = {
        "kind": "rl",
        "inputs": {"model": "base"},
        "algorithm": "grpo",
        "rewards": ["environment"],
        "environment": environment,
    }
    made = {"name": "sums", "model": "tiny", "task": task, "stages": {"rl": stage}}
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(made))
    return config


def test_the_environment_takes_what_it_does_not_set_from_the_task(tmp_path: Path) -> None:
    path = str(write_sums(tmp_path))
    task = {"name": "verifiers", "python": "venv", "path": path, "args": {"count": 3}}
    own = {"name": "verifiers", "start_s": 7.0}
    resolved, _ = resolve_configs([run_of(tmp_path, {**task, "limit": 5}, own)], [])
    stage = resolved.config.stages["rl"]
    assert isinstance(stage, RlStage) and stage.environment is not None
    found = stage.environment.fields()
    assert {**task, "start_s": 7.0}.items() <= {"name": "verifiers", **found}.items()
    assert "limit" not in found
    assert stage.outside_paths()["environment.path"] == path
    with pytest.raises(ConfigError, match="name the taskset"):
        resolve_configs([run_of(tmp_path, {"name": "verifiers", "python": "x"}, own)], [])


def test_the_environment_alone_is_refused(tmp_path: Path) -> None:
    path = str(write_sums(tmp_path))
    environment = {"name": "verifiers", "python": "venv", "path": path}
    resolved, manager = resolve_configs([run_of(tmp_path, {"name": "digits"}, environment)], [])
    with pytest.raises(ConfigError, match="plays the problems of task 'verifiers' alone"):
        check_environments(resolved, manager)
