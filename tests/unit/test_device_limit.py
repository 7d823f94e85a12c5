"""The tag that a limit on stages can be on: taken where Prefect's server has one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.pipeline import environment, prepared

PROGRAM = """
import sys
from pathlib import Path
from posttrain.pipelines.run.prefect_env import configure_prefect
home = Path(sys.argv[1])
configure_prefect(home)
from posttrain.pipelines.run.prefect_server import OwnServer
server = OwnServer(home)
server.begin()
from prefect.client.orchestration import get_client
from posttrain.pipelines.run.flow import device_tags
server.wait()
for limit in (None, "posttrain-cuda", "posttrain-cpu"):
    if limit:
        with get_client(sync_client=True) as client:
            client.create_concurrency_limit(limit, 1)
    print(device_tags("cpu"))
"""
ELSEWHERE = 'from posttrain.pipelines.run.flow import device_tags; print(device_tags("cpu"))'


@pytest.mark.timeout(300)
def test_the_run_s_own_server_is_asked_whether_there_is_a_limit(tmp_path: Path) -> None:
    home = prepared(tmp_path / "home")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(home)],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-3:] == ["[]", "[]", "['posttrain-cpu']"]


def test_a_server_of_somebody_else_is_asked_too(prefect_url: str, tmp_path: Path) -> None:
    """A task whose tag has no limit asks for a slot all the same, and fails where none is given."""
    place = {"PREFECT_API_URL": prefect_url, "PREFECT_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment() | place,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_for_a_slot_of_a_server_that_is_away_nobody_waits(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment()
        | {"PREFECT_API_URL": "http://127.0.0.1:9/api", "PREFECT_HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
