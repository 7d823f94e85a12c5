"""A run whose rewards and tools are on the nodes of a Ray cluster is the run of one machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.core.kit.tiny import BARE_TEMPLATE, make_tiny_model, make_tiny_tokenizer
from tests.helpers.pipeline import (
    Finished,
    prepared,
    run_command,
    start_command,
    tiny_config,
    wait_for_step,
    write_config,
)
from tests.helpers.two_nodes import TwoNodes

pytestmark = pytest.mark.usefixtures("shared_prefect")

PLUGINS = """
import near
from posttrain.core.contracts import NoConfig, Reward, Tool, ToolResult
from posttrain.core.types import Score


class Variety(Reward[NoConfig]):
    "R = share of different characters."

    name, Config = "variety", NoConfig

    def score(self, samples):
        return [Score(near.share(sample.text)) for sample in samples]


class Backwards(Tool[NoConfig]):
    "Says its argument backwards."

    name, Config, description, at_once = "backwards", NoConfig, "reverses", 64

    def call(self, arguments):
        return ToolResult(near.turned(arguments))
"""
NEAR = """
def share(text):
    return len(set(text)) / max(1, len(text))


def turned(text):
    return text[::-1]
"""
ALONE = ("--set", "stages.rl.reuse_outputs=false")
"""Without a cluster, as ranks compute: what sampling computed is not there in another process."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("config")
    (folder / "mine.py").write_text(PLUGINS)
    (folder / "near.py").write_text(NEAR)
    # A small alphabet, so that a random model often writes the character that ends a call.
    tokenizer = make_tiny_tokenizer("\n0123456789+-*=?: ", BARE_TEMPLATE)
    model = make_tiny_model(folder / "model", init_std=0.02, tokenizer=tokenizer)
    made: dict[str, Any] = tiny_config(model)
    environment = {
        "name": "tools",
        "tools": ["mine.py:Backwards"],
        "call_open": "",
        "call_close": "7",
        "instructions": "",
        "max_turns": 3,
    }
    rl = made["stages"]["rl"] | {
        "inputs": {"model": "base"},
        "environment": environment,
        "rewards": ["accuracy", {"name": "mine.py:Variety", "weight": 0.5}],
        "generation": {"max_response_length": 48},
        "steps": 6,
        "checkpoint_every": 0,
        "evaluate_every": 3,
    }
    judged = made["stages"]["evaluate"] | {"environment": environment, "inputs": {"model": "rl"}}
    return write_config(folder / "run.yaml", made | {"stages": {"rl": rl, "evaluate": judged}})


def given(nodes: TwoNodes, *more: str) -> tuple[str, ...]:
    settings = (
        f"cluster.ray.address={nodes.shape.address}",
        "cluster.rewards.cpus=1",
        "cluster.environments.cpus=1",
        *more,
    )
    return tuple(word for setting in settings for word in ("--set", setting))


def token(nodes: TwoNodes) -> dict[str, str]:
    return {"RAY_AUTH_TOKEN_PATH": str(nodes.home / "cluster" / "token")}


def digests(result: dict[str, Any]) -> list[str]:
    """Of all that the run has made."""
    stages = result["stages"].values()
    return [a["digest"] for stage in stages for a in stage["artifacts"] if a["kind"] == "model"]


@pytest.fixture(scope="module")
def local(config: Path) -> Finished:
    home = prepared(config.parent / "local")
    done = run_command("run", str(config), *ALONE, "--home", str(home), "--json")
    assert done.code == 0, done.text
    assert done.result["stages"]["rl"]["metrics"]["tools/calls_per_response"] > 0.1
    return done


@pytest.mark.slow
def test_pools_that_are_killed_on_the_way_change_nothing(
    running_nodes: TwoNodes, config: Path, local: Finished, tmp_path: Path
) -> None:
    home = prepared(tmp_path / "home")
    process = start_command(
        "run",
        str(config),
        *given(running_nodes),
        *("--home", str(home), "--json"),
        variables=token(running_nodes),
    )
    wait_for_step(home, 2, process)
    actors = running_nodes.actors()
    assert len(actors) == 3, "rewards on both nodes, and an environment where there is room"
    for actor in actors[1:]:
        actor.kill()
    out, _ = process.communicate(timeout=240)
    result = json.loads(out.strip().splitlines()[-1])
    assert result["status"] == "completed", out
    assert any("was lost" in text for text in result["warnings"]), result["warnings"]
    assert digests(result) == digests(local.result)
    for stage in ("rl", "evaluate"):
        found, wanted = result["stages"][stage], local.result["stages"][stage]
        assert found["status"] == "ran"
        same = {k: v for k, v in wanted["metrics"].items() if k.startswith(("eval/", "tools/"))}
        assert same == {k: found["metrics"][k] for k in same}
    assert not running_nodes.actors()


@pytest.mark.slow
def test_plan_and_validate_say_what_pools_need(running_nodes: TwoNodes, config: Path) -> None:
    where = ("--home", str(running_nodes.home), "--no-calibration", "--json")
    plan = run_command("plan", str(config), *given(running_nodes), *where)
    assert plan.result["cluster"].endswith(
        "1 rank of 1 CPU each: they fit; rewards with 1 CPU on 2 of 2 nodes; environments with 1 "
        "CPU on 1 of 2 nodes"
    ), plan.text
    more = given(running_nodes, "cluster.rewards.nodes=2", "cluster.rewards.cpus=2")
    plan = run_command("plan", str(config), *more, *where)
    assert (
        "rewards with 2 CPU: no room next to the ranks on 2 nodes, only on 1"
        in (plan.result["cluster"])
    ), plan.text
    many = given(running_nodes, "cluster.environments.at_once=2000")
    noted = run_command("validate", str(config), *many)
    assert noted.code == 0 and "tool 'mine.py:Backwards' takes 64 at a time" in noted.text
    host = given(running_nodes, "stages.rl.rewards=[accuracy]")
    refused = run_command("validate", str(config), *host)
    assert refused.code == 2, refused.text
    assert "cluster.rewards: no reward of this run is scored in workers (accuracy" in refused.text
