"""kill -9 at random moments of every stage: the same command goes on, and ends where it would have.

A home is killed in a chain, then left to finish. A chain of two kills is the sample; the slow
tests have five chains of six.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow import MlflowClient

from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.training.checkpoint import complete_checkpoints
from tests.helpers.pipeline import (
    Finished,
    prepared,
    run_command,
    start_command,
    tiny_config,
    write_config,
)

MEASURED = ("time/", "memory/", "throughput/")


@dataclass(frozen=True)
class Moment:
    """`delay` seconds after the stage is first heard of."""

    stage: str
    delay: float


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every kind of stage that trains, with a checkpoint after every step.

    Two of them by the number of steps, two by time alone.
    """
    folder = tmp_path_factory.mktemp("kill")
    made = tiny_config(make_tiny_model(folder / "model"))
    stages = made["stages"]
    stages["sft"]["steps"] = 6
    stages["reward_model"] |= {"batch_size": 4, "epochs": 2}
    dpo = {"num_prompts": 24, "num_generations": 16, "batch_size": 4, "generation": {}}
    dpo["generation"] = {"max_response_length": 8}
    stages["preference"] = {"kind": "preference", "inputs": {"model": "sft"}, **dpo}
    for name in ("reward_model", "rl"):
        stages[name]["checkpoint_every"] = 1
    made["keep"] = {"checkpoint_minutes": 1e-6}
    stages["rl"]["reward_whiten"] = "running"  # it keeps a state from step to step
    return write_config(folder / "run.yaml", made)


@pytest.fixture(scope="module")
def whole(config: Path) -> Finished:
    done = run_command(
        "run", str(config), "--home", str(prepared(config.parent / "whole")), "--json"
    )
    assert done.code == 0, done.text
    return done


def moments(whole: Finished, seed: int, kills: int) -> list[Moment]:
    """Random ones within random stages, in the order in which they come."""
    draw, stages = random.Random(seed), list(whole.result["stages"].items())
    chosen = sorted(draw.choices(range(len(stages)), k=kills))
    return [Moment(stages[i][0], draw.uniform(0, stages[i][1]["seconds"])) for i in chosen]


def kill_at(config: Path, home: Path, moment: Moment) -> None:
    """Start the command, kill it (it alone) at that moment, and see all of its processes end."""
    process = start_command("run", str(config), "--home", str(home), "--plain")
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if line.startswith(f"[{moment.stage}]"):
            break
    else:
        raise AssertionError(f"ended before '{moment.stage}': {''.join(said)}")
    time.sleep(moment.delay)
    children = psutil.Process(process.pid).children(recursive=True)
    assert process.poll() is None, "killed while it runs"
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive, [child.cmdline() for child in alive]


def digests(run: Finished) -> dict[str, dict[str, str]]:
    """Of everything that does not hold times: models and datasets by stage."""
    return {
        name: {a["kind"]: a["digest"] for a in stage["artifacts"] if "model" in a["kind"]}
        for name, stage in run.result["stages"].items()
    }


def histories(run: Finished) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """Every metric that does not measure time or memory, by stage and name."""
    client = MlflowClient(run.result["mlflow_uri"])
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for name, stage in run.result["stages"].items():
        data: Any = client.get_run(stage["mlflow_run_id"]).data
        for key in data.metrics:
            if not key.startswith(MEASURED):
                points = client.get_metric_history(stage["mlflow_run_id"], key)
                found[name, key] = sorted((point.step, point.value) for point in points)
    return found


@pytest.mark.parametrize(
    ("seed", "kills"),
    [
        pytest.param(seed, kills, marks=pytest.mark.slow)
        for seed, kills in [(44, 2), *((n, 6) for n in range(5))]
    ],
)
def test_a_run_that_is_killed_again_and_again_ends_as_if_it_were_not(
    config: Path, whole: Finished, tmp_path: Path, seed: int, kills: int
) -> None:
    home = prepared(tmp_path / "home")
    for moment in moments(whole, seed, kills):
        kill_at(config, home, moment)
    done = run_command("run", str(config), "--home", str(home), "--json")
    assert done.code == 0, done.text
    assert digests(done) == digests(whole), "bit for bit the same weights"
    assert histories(done) == histories(whole)
    assert not list((home / "artifacts").glob(".partial-*"))
    assert not list((home / "checkpoints").rglob("*")), "nothing is left of unfinished stages"
    ours = [p for p in psutil.process_iter(["cmdline"]) if str(home) in str(p.info["cmdline"])]
    assert not ours, ours


@pytest.mark.slow
def test_a_damaged_checkpoint_is_never_continued_or_passed_over(
    config: Path, tmp_path: Path
) -> None:
    """One flipped bit, of weights or of pairs: refused with what to do, which then works."""
    home = prepared(tmp_path / "home")
    command = ["run", str(config), "--home", str(home), "--set", "keep.checkpoints=1"]
    process = start_command(*command, "--plain")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("[reward_model] step 2/"):
            break
    process.kill()
    process.wait()
    (stage,) = (home / "checkpoints").iterdir()
    newest = complete_checkpoints(stage)[0]
    weights = min(newest.rglob("whole.safetensors"))
    kept = weights.read_bytes()
    weights.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    refused = run_command(*command)
    assert refused.code == 1 and "--fresh" in refused.text and "damaged" in refused.text
    assert "Traceback" not in refused.text
    assert weights.is_file(), "what is damaged is left for somebody to look at"
    weights.write_bytes(kept)
    (answers,) = (home / "checkpoints").rglob("own_answers.json")
    answers.write_text(answers.read_text().replace("1", "2", 1))
    refused = run_command(*command)
    assert refused.code == 1 and "--fresh" in refused.text and str(answers) in refused.text
    done = run_command(*command, "--fresh", "--json")
    assert done.code == 0, done.text
    assert done.result["stages"]["reward_model"]["status"] == "ran"
