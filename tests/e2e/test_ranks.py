"""A run whose learners have two ranks is the run of one process, and can become it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file

from posttrain.core.analysis.evidence import read_step
from posttrain.core.kit.tiny import make_tiny_model
from tests.helpers.pipeline import (
    Finished,
    prepared,
    run_command,
    run_loaded,
    start_command,
    tiny_config,
    wait_for_step,
    write_config,
)

RANKS = "limits.learner_ranks=2"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every kind of stage that trains; the policy with a critic, KL in the loss to a
    reference that moves, and stream."""
    folder = tmp_path_factory.mktemp("ranks")
    made: dict[str, Any] = tiny_config(make_tiny_model(folder / "model"))
    made["model"]["attention"] = "stream"
    made["stages"]["rl"] |= {
        "algorithm": "ppo",
        "critic": {"optimizer": {"learning_rate": 1.0e-3}},
        "kl": {
            "place": "loss",
            "controller": {"name": "fixed", "coef": 0.01},
            "ref_update": {"rule": "bema", "every": 2},
        },
        "steps": 6,
    }
    made["stages"]["process"] = {
        "kind": "rl",
        "inputs": {"model": "sft"},
        "algorithm": "prime",
        "implicit_prm": {"optimizer": {"learning_rate": 1.0e-3}},
        "steps": 3,
        "prompts_per_step": 8,
        "num_generations": 4,
        "generation": {"max_response_length": 8},
        "optimizer": {"learning_rate": 1.0e-3},
        "evaluate_every": 0,
    }
    made["stages"]["preference"] = {
        "kind": "preference",
        "inputs": {"model": "sft"},
        "algorithm": "dpo",
        "num_prompts": 24,
        "num_generations": 16,
        "generation": {"max_response_length": 8},
        "optimizer": {"learning_rate": 1.0e-3},
    }
    for name in ("evaluate_base", "evaluate", "register"):
        del made["stages"][name]
    return write_config(folder / "run.yaml", made)


@pytest.fixture(scope="module")
def alone(config: Path) -> Finished:
    done = run_command("run", str(config), "--home", str(prepared(config.parent / "one")), "--json")
    assert done.code == 0, done.text
    return done


def assert_same_models(found: Finished, wanted: Finished) -> None:
    """The weights of every stage, to what sums in another order differ by."""
    assert found.result["stages"].keys() == wanted.result["stages"].keys()
    for name, stage in wanted.result["stages"].items():
        for artifact in stage["artifacts"]:
            if artifact["kind"] not in ("model", "reward_model"):
                continue
            other = next(
                a
                for a in found.result["stages"][name]["artifacts"]
                if a["kind"] == artifact["kind"]
            )
            left = load_file(Path(other["uri"]) / "model.safetensors")
            right = load_file(Path(artifact["uri"]) / "model.safetensors")
            assert left.keys() == right.keys()
            for tensor in right:
                torch.testing.assert_close(
                    left[tensor], right[tensor], rtol=0, atol=2e-4, msg=f"{name}: {tensor}"
                )


@pytest.mark.slow
def test_every_stage_makes_the_model_that_one_process_makes(
    config: Path, alone: Finished, tmp_path: Path
) -> None:
    home = prepared(tmp_path / "home")
    done = run_command("run", str(config), "--set", RANKS, "--home", str(home), "--json")
    assert done.code == 0, done.text
    assert_same_models(done, alone)
    one = config.parent / "one"
    for stage in ("sft", "reward_model", "preference"):
        (left,), (right,) = (list((at / "artifacts").glob(f"{stage}-*")) for at in (home, one))
        ours, wanted = (read_step(at / "evidence", 1) for at in (left, right))
        known = wanted.batch.mask.bool()
        torch.testing.assert_close(
            ours.seen_logprobs[known],
            wanted.seen_logprobs[known],
            rtol=0,
            atol=1e-4,
            equal_nan=True,
        )
        assert ours.given.keys() == wanted.given.keys()
    (record,) = (home / "artifacts").glob("rl-*/replay/steps.jsonl")
    row = next(r for r in map(json.loads, record.read_text().splitlines()) if r.get("step") == 3)
    critic = [name for name in row["weights"] if name.startswith("critic/")]
    again = replay(home, done, "3")
    assert again.code == 0 and again.result["equal"], again.text
    assert again.result["steps"][-1]["tensors"] == len(row["batch"]) + len(row["weights"])
    assert 0 < len(critic) < len(row["weights"]), "the policy's, and the critic's"
    record.write_text(record.read_text().replace(row["weights"][critic[2]], "0" * 16))
    again = replay(home, done, "3")
    assert again.code == 1, again.text
    assert again.result["first_difference"]["name"] == critic[2]


def replay(home: Path, run: Finished, step: str) -> Finished:
    """The step of its rl stage, on two ranks as the run was."""
    return run_command(
        "replay",
        run.result["run_id"],
        "--stage",
        "rl",
        "--step",
        step,
        "--home",
        str(home),
        "--json",
    )


@pytest.mark.slow
def test_a_run_killed_with_two_ranks_goes_on_with_one(config: Path, tmp_path: Path) -> None:
    made = yaml.safe_load(config.read_text())
    rl = made["stages"]["rl"] | {"inputs": {"model": "base"}, "rewards": ["accuracy"], "steps": 8}
    path = write_config(tmp_path / "run.yaml", made | {"stages": {"rl": rl}})
    whole = run_command("run", str(path), "--home", str(prepared(tmp_path / "whole")), "--json")
    home = prepared(tmp_path / "home")
    process = start_command("run", str(path), "--set", RANKS, "--home", str(home))
    wait_for_step(home, 3, process)
    children = psutil.Process(process.pid).children(recursive=True)
    ranks = [child for child in children if "posttrain.pipelines.ranks.worker" in child.cmdline()]
    assert len(ranks) == 4, "two ranks, each with its guard"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(ranks, timeout=30)
    assert not alive, "ranks end with their run"
    done = run_command("run", str(path), "--home", str(home), "--json")
    assert done.code == 0, done.text
    assert done.result["stages"]["rl"]["status"] == "resumed"
    assert_same_models(done, whole)


def test_what_ranks_cannot_do_is_said_before_the_run(config: Path, tmp_path: Path) -> None:
    done = run_loaded(
        *("run", str(config), "--set", RANKS, "--set", "stages.rl.policy_loss=trpo"),
        *("--home", str(tmp_path / "home")),
    )
    assert done.code == 2, done.text
    assert "solves for its step with whole weights" in done.text and "learner_ranks: 1" in done.text
    assert json.dumps(done.result) == "{}"
