"""Runs the real command on a tiny model, and reads back what it left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from posttrain.core.runtime import startup
from posttrain.core.runtime.files import create_database
from posttrain.core.tracking.mlflow_store import prepare_database
from posttrain.pipelines.run.prefect_program import SCHEMA
from tests.helpers.warm import WarmCommands

COMMAND = [sys.executable, "-m", "posttrain.pipelines.cli"]


def tiny_config(model_dir: Path) -> dict[str, Any]:
    """The whole DAG of the quickstart, at a size that takes seconds."""
    generation = {"max_response_length": 8}
    fast = {"learning_rate": 3.0e-3}
    return {
        "name": "tiny",
        "engine": "transformers",
        "model": {"source": str(model_dir), "dtype": "float32", "max_model_len": 256},
        "task": {"name": "arithmetic", "left_digits": [1, 1], "right_digits": [1, 1]},
        "evaluation": {"num_problems": 4, "max_response_length": 8, "num_samples": 2},
        "limits": {"num_threads": 1},
        "stages": {
            "evaluate_base": {"kind": "evaluate", "inputs": {"model": "base"}},
            "sft": {
                "kind": "sft",
                "inputs": {"model": "base"},
                "steps": 3,
                "batch_size": 8,
                "optimizer": fast,
            },
            "reward_model": {
                "kind": "reward_model",
                "inputs": {"model": "sft"},
                "num_prompts": 24,
                "num_generations": 16,
                "generation": generation,
                "optimizer": fast,
            },
            "rl": {
                "kind": "rl",
                "inputs": {"model": "sft", "reward_model": "reward_model"},
                "steps": 4,
                "prompts_per_step": 4,
                "num_generations": 4,
                "num_mini_batches": 2,
                "micro_batch_size": 6,
                "generation": generation,
                "rewards": ["accuracy", {"name": "reward_model", "weight": 0.2}],
                "evaluate_every": 2,
                "checkpoint_every": 1,
                "optimizer": {"learning_rate": 1.0e-3},
            },
            "evaluate": {
                "kind": "evaluate",
                "inputs": {"model": "rl", "baseline": "evaluate_base"},
            },
            "register": {
                "kind": "register",
                "inputs": {"model": "rl", "evaluation": "evaluate"},
                "registered_name": "tiny",
            },
        },
    }


def write_config(path: Path, config: dict[str, Any]) -> Path:
    """The config as a YAML file."""
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


REPORTS_TO: dict[str, str] = {}
"""Variables that name the servers of all commands; the fixture `shared_prefect` sets them."""

STARTING = threading.Lock()
WARM: list[WarmCommands] = []
"""The process that forks commands; one for as long as the tests run."""

READ_EARLY = ("PYTHONPATH", "HOME", "HF_HOME", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", startup.CHOICE)
AT_START = {name: os.environ.get(name) for name in READ_EARLY}
"""Variables that are read while Python and the libraries are loaded, as tests find them."""
LATE = ("PREFECT_", "MLFLOW_", "AWS_", "RAY_", "POSTTRAIN_", "PYTHONPATH")
"""How variables begin that are read by what a command loads itself, or when it is used; for
PYTHONPATH see `tests.helpers.warm`."""


def environment() -> dict[str, str]:
    """This process's environment, one thread, and no tracking server but the tests' own."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_"))}
    return env | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | REPORTS_TO


def prepared(home: Path) -> Path:
    """`home`, with the empty databases of Prefect and MLflow, for a test that looks into them."""
    prepare_database(home)
    (home / "prefect").mkdir(parents=True)
    create_database(home / "prefect" / "prefect.db", SCHEMA, "prefect")
    return home


@dataclass(frozen=True)
class Finished:
    """A finished command: exit code, all text, the JSON object that ends its output, and stdout."""

    code: int
    text: str
    result: dict[str, Any]
    out: str = ""


def run_command(
    *arguments: str, timeout: float = 300, variables: Mapping[str, str] | None = None
) -> Finished:
    """Run `posttrain ARGUMENTS` to its end, with `variables` added to the environment.

    The libraries are loaded already, unless they read `variables`, in a file with `shared_prefect`
    and in commands that start no server.
    """
    if REPORTS_TO or arguments[0] in ("validate", "plan"):
        return run_loaded(*arguments, timeout=timeout, variables=variables)
    return run_whole(*arguments, timeout=timeout, variables=variables)


def run_loaded(
    *arguments: str, timeout: float = 300, variables: Mapping[str, str] | None = None
) -> Finished:
    """The same in a process that begins with the libraries loaded, but where a test has set other
    variables for them, or another thread waits for its command.
    """
    given = dict(variables or {})
    early = [name for name in given if name == startup.CHOICE or not name.startswith(LATE)]
    if early or AT_START != {name: os.environ.get(name) for name in READ_EARLY}:
        return run_whole(*arguments, timeout=timeout, variables=given)
    with STARTING:
        warm = WARM[0] if WARM else WarmCommands(environment())
        WARM[:] = [warm]
    if warm.is_busy():
        return run_whole(*arguments, timeout=timeout, variables=given)
    return finished(arguments, *warm.run(arguments, environment() | given, timeout))


def run_whole(
    *arguments: str, timeout: float = 300, variables: Mapping[str, str] | None = None
) -> Finished:
    """The same in an interpreter of its own, as users start it."""
    done = subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment() | dict(variables or {}),
    )
    return finished(arguments, done.returncode, done.stdout, done.stderr)


def finished(arguments: Sequence[str], code: int, out: str, err: str) -> Finished:
    """What a command left, with the JSON object that `--json` asks for."""
    lines = out.strip().splitlines()
    result = json.loads(lines[-1]) if "--json" in arguments and lines else {}
    return Finished(code, out + err, result, out)


def start_command(
    *arguments: str, variables: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start `posttrain ARGUMENTS` in its own process group."""
    return subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment() | dict(variables or {}),
        start_new_session=True,
    )


def journal_lines(home: Path, stage: str) -> list[str]:
    """What runs in `home` have noted of a stage's steps so far, a line each."""
    journals = sorted((home / "runs").glob(f"metrics-{stage}-*.jsonl"))
    return [line for journal in journals for line in journal.read_text().splitlines()]


def wait_for_step(
    home: Path, step: int, process: subprocess.Popen[str], seconds: float = 240
) -> None:
    """Until the RL stage has recorded `step`."""
    end = time.monotonic() + seconds  # on a busy machine the start alone takes half a minute
    while time.monotonic() < end:
        if any(json.loads(line)["step"] >= step for line in journal_lines(home, "rl") if line):
            return
        assert process.poll() is None, process.stdout.read() if process.stdout else "ended early"
        time.sleep(0.05)
    raise AssertionError(f"step {step} never came")
