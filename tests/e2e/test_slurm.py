"""The script for Slurm, with an `srun` that starts processes of this machine, and real Ray."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.runtime.processes import free_ports
from tests.helpers.pipeline import (
    environment,
    journal_lines,
    prepared,
    run_command,
    tiny_config,
    write_config,
)

SCRIPT = Path(__file__).parents[2] / "infra/slurm/posttrain.sbatch"
# Options come first, then the command; which node it was for is noted.
SRUN = """#!/usr/bin/env bash
printf '%s\\n' "$*" >>"$SRUN_LOG"
while [ "${1#-}" != "$1" ]; do shift; done
exec "$@"
"""
pytestmark = [
    pytest.mark.usefixtures("shared_prefect"),
    pytest.mark.skipif(
        find_spec("ray") is None, reason="Ray is not installed: pip install 'posttrain[ray]'"
    ),
    pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed"),
]


class Job:
    """An allocation of two nodes, both this machine, with one CPU each."""

    def __init__(self, folder: Path, number: str) -> None:
        self.log, self.number = folder / "srun.log", number
        self.files = Path("/tmp") / f"posttrain-{number}"
        bin_folder = folder / "bin"
        bin_folder.mkdir()
        programs = {
            "srun": SRUN,
            "scontrol": "#!/bin/sh\necho node-a\necho node-b\n",
            "posttrain": f'#!/bin/sh\nexec "{sys.executable}" -m posttrain.pipelines.cli "$@"\n',
            "ray": f'#!/bin/sh\nexec "{sys.executable}" -m ray.scripts.scripts "$@"\n',
        }
        for name, text in programs.items():
            (bin_folder / name).write_text(text)
            (bin_folder / name).chmod(0o755)
        (port,) = free_ports(1)
        self.variables = {
            **environment(),
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "SRUN_LOG": str(self.log),
            "SLURM_JOB_ID": number,
            "SLURM_JOB_NODELIST": "node-[a-b]",
            "SLURM_CPUS_PER_TASK": "1",
            "POSTTRAIN_RAY_HOST": "127.0.0.1",
            "POSTTRAIN_RAY_PORT": str(port),
            "POSTTRAIN_CACHE": str(folder / "cache"),
        }

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(SCRIPT), *arguments],
            env=self.variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def left(self) -> list[psutil.Process]:
        """Processes of its Ray cluster."""
        found = []
        for process in psutil.process_iter():
            try:
                if str(self.files) in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue
        return found


@pytest.fixture
def config(tmp_path: Path) -> Path:
    made: dict[str, Any] = tiny_config(make_tiny_model(tmp_path / "model"))
    rl = made["stages"]["rl"] | {
        "inputs": {"model": "base"},
        "rewards": ["accuracy"],
        "steps": 4,
        "checkpoint_every": 1,
        "evaluate_every": 0,
    }
    cluster = {"ray": {"address": "env"}}
    limits = made["limits"] | {"learner_ranks": 2}
    changed = {"stages": {"rl": rl}, "cluster": cluster, "limits": limits}
    return write_config(tmp_path / "run.yaml", made | changed)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_runs_the_config_on_its_nodes_and_leaves_nothing(
    config: Path, tmp_path: Path
) -> None:
    job, home = Job(tmp_path, f"t{os.getpid()}"), prepared(tmp_path / "home")
    store = f"file://{tmp_path}/store"
    given = (str(config), "--home", str(home), "--store", store, "--json")
    stopped = job.start(*given)
    end = time.monotonic() + 400
    while not any(json.loads(line)["step"] >= 2 for line in journal_lines(home, "rl")):
        assert stopped.poll() is None and time.monotonic() < end, stopped.communicate()[0]
        time.sleep(0.1)
    assert (job.files / "token").stat().st_mode & 0o777 == 0o600
    token = (job.files / "token").read_text().strip()
    assert len(token) == 64 and token not in job.log.read_text()
    os.kill(stopped.pid, signal.SIGTERM)  # as Slurm does before the time is over
    out, _ = stopped.communicate(timeout=200)
    assert stopped.returncode == 130, out
    assert not job.left() and not job.files.exists()
    again = job.start(*given)
    out, _ = again.communicate(timeout=400)
    assert again.returncode == 0, out
    result = json.loads([line for line in out.splitlines() if line.startswith("{")][-1])
    assert result["stages"]["rl"]["status"] == "resumed", out
    assert token not in out and not job.left() and not job.files.exists()
    nodes = {line.split("--nodelist=")[1].split()[0] for line in job.log.read_text().splitlines()}
    assert nodes == {"node-a", "node-b"}


def test_an_address_that_is_not_in_the_environment_is_one_sentence(
    config: Path, tmp_path: Path
) -> None:
    plan = run_command("plan", str(config), "--home", str(tmp_path), "--no-calibration", "--json")
    assert "POSTTRAIN_RAY_ADDRESS is not set" in plan.result["cluster"], plan.text
