"""An environment in a config: its defaults, its tools' fields, and what is reported of mistakes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain.core.config.evaluation_stages import EvaluateStage
from posttrain.core.config.loading import load_config
from posttrain.core.config.resolve import ResolvedRun, resolve
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.errors import ConfigError
from posttrain.core.plugin_manager import PluginManager
from posttrain.pipelines.run.planning import parts_of_stage

MANAGER = PluginManager()


def resolved(folder: Path, environment: object, **fields: Any) -> ResolvedRun:
    rl = {"kind": "rl", "inputs": {"model": "base"}, "environment": environment, **fields}
    config = {
        "task": "digits",
        "engine": "transformers",
        "stages": {
            "rl": rl,
            "look": {"kind": "evaluate", "inputs": {"model": "rl"}, "environment": environment},
        },
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return resolve(load_config([path]), MANAGER)


def test_defaults_are_filled_in_and_every_plugin_is_used(tmp_path: Path) -> None:
    (tmp_path / "facts.txt").write_text("one fact")
    tools = ["calculator", {"name": "search", "path": str(tmp_path / "facts.txt"), "top": 1}]
    run = resolved(tmp_path, {"name": "tools", "tools": tools, "max_turns": 2}, algorithm="arpo")
    for name in ("rl", "look"):
        stage = run.config.stages[name]
        assert isinstance(stage, RlStage | EvaluateStage) and stage.environment is not None
        fields: Any = stage.environment.fields()
        assert stage.environment.max_turns == 2 and fields["max_calls"] == 3
        assert fields["tools"][0] == {"name": "calculator", "max_chars": 200, "max_bits": 1024}
        assert fields["tools"][1]["top"] == 1 and fields["tools"][1]["passage"] == "paragraph"
        used = {(use.kind, use.name) for use in run.plugins[name]}
        assert {("environment", "tools"), ("tool", "calculator"), ("tool", "search")} <= used
    rl = run.config.stages["rl"]
    assert isinstance(rl, RlStage) and rl.sampler.name == "arpo_tree"


def test_an_environment_by_name_alone_has_its_default_tool(tmp_path: Path) -> None:
    run = resolved(tmp_path, "tools")
    assert ("tool", "calculator") in {(use.kind, use.name) for use in run.plugins["rl"]}


def test_what_a_tool_reads_is_part_of_the_identity(tmp_path: Path) -> None:
    facts = tmp_path / "facts.txt"
    environment = {"name": "tools", "tools": [{"name": "search", "path": str(facts)}]}
    digests = []
    for text in ("one", "two"):
        facts.write_text(text)
        run = resolved(tmp_path, environment)
        digests.append(
            [
                parts_of_stage(run, name, {}, "transformers", "")["file environment.tools.0.path"]
                for name in ("rl", "look")
            ]
        )
    assert digests[0] != digests[1] and digests[0][0] == digests[0][1]


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"name": "toolz"}, r"run.yaml:\d+: stages.rl.environment: .*did you mean 'tools'"),
        (
            {"name": "tools", "tools": ["calculater"]},
            r"run.yaml:\d+: stages.rl.environment.tools.0: .*did you mean 'calculator'",
        ),
        (
            {"name": "tools", "tools": [{"name": "calculator", "max_bit": 9}]},
            r"run.yaml:\d+: stages.rl.environment.tools.0.max_bit",
        ),
        ({"name": "tools", "tools": 3}, r"run.yaml:\d+: stages.rl.environment.tools"),
        ({"name": "tools", "max_call": 1}, r"run.yaml:\d+: stages.rl.environment.max_call"),
        ({"name": "tools", "max_turns": 0}, r"run.yaml:\d+: stages.rl.environment.max_turns"),
        (
            {"name": "tools", "tools": [{"name": "search", "path": "/no/such"}]},
            r"run.yaml:\d+: stages.rl.environment.tools.0.path: there is no file or folder",
        ),
    ],
)
def test_a_mistake_is_shown_with_its_line(tmp_path: Path, environment: object, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolved(tmp_path, environment)
    assert re.search(says, str(error.value)), str(error.value)


def test_a_single_tool_needs_no_list(tmp_path: Path) -> None:
    stages = [
        resolved(tmp_path, {"name": "tools", "tools": tools}).config.stages["rl"]
        for tools in ("calculator", ["calculator"])
    ]
    assert stages[0] == stages[1]


def test_a_branching_sampler_without_an_environment_says_what_to_change(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"stages.rl.sampler: 'arpo_tree' .*sampler: group"):
        resolved(tmp_path, None, algorithm="arpo")
    stage = resolved(tmp_path, None, algorithm="arpo", sampler="group").config.stages["rl"]
    assert isinstance(stage, RlStage) and stage.environment is None


def test_a_tree_that_begins_larger_than_it_may_be_is_refused(tmp_path: Path) -> None:
    sampler = {"name": "arpo_tree", "initial": 9}
    with pytest.raises(ConfigError, match=r"stages.rl.sampler: .*begins with initial: 9"):
        resolved(tmp_path, "tools", sampler=sampler, num_generations=8)


def test_hard_attribution_needs_the_tree_and_finds_it(tmp_path: Path) -> None:
    hard = {"advantage": {"name": "grpo", "attribution": "hard"}}
    with pytest.raises(ConfigError, match="reads the column 'node_id'"):
        resolved(tmp_path, "tools", **hard)
    assert resolved(tmp_path, "tools", sampler="arpo_tree", **hard)
