"""The JSON Schema of a config: it takes every shipped config and refuses usual mistakes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from posttrain.core.config.json_schema import json_schema
from posttrain.core.config.loading import load_config, shipped_configs
from posttrain.core.config.positions import read_yaml
from posttrain.core.config.resolve import resolve
from posttrain.core.errors import ConfigError
from posttrain.core.plugin_manager import PluginManager
from posttrain.pipelines.cli.main import app

BASE: dict[str, Any] = {
    "model": {"source": "org/model"},
    "task": "arithmetic",
    "stages": {
        "sft": {"kind": "sft", "inputs": {"model": "base"}},
        "rl": {"kind": "rl", "inputs": {"model": "sft"}},
        "test": {"kind": "evaluate", "inputs": {"model": "rl"}},
    },
}
MISTAKES: list[tuple[str, Any]] = [
    ("stages", {}),
    ("modle", {"source": "x"}),
    ("model.dtpye", "float32"),
    ("model.dtype", "fp16"),
    ("model.max_model_len", "long"),
    ("model.renderer", "chat_templates"),
    ("seed", -1),
    ("name", "my run"),
    ("engine", "vlm"),
    ("task", "arithmetics"),
    ("task", "jsonl"),  # it needs a path
    ("task", {"path": "problems.jsonl"}),
    ("task", {"name": "arithmetic", "digits": 2}),
    ("evaluation.num_problems", 0),
    ("stages.rl.kind", "rlhf"),
    ("stages.rl.inputs", {}),
    ("stages.test.inputs", {"model": "rl", "base": "sft"}),
    ("stages.Rl", {"kind": "rl", "inputs": {"model": "base"}}),
    ("stages.rl.stepz", 10),
    ("stages.rl.steps", 0),
    ("stages.rl.steps", True),
    ("stages.rl.algorithm", "grppo"),
    ("stages.rl.rewards", [{"name": "accuracy", "wieght": 2}]),
    ("stages.rl.policy_loss", []),
    ("stages.rl.rewards", ["acuracy"]),
    ("stages.rl.advantage", {"name": "gae", "lamda": 0.9}),
    ("stages.rl.policy_loss", {"name": "ppo_clip", "clip_low": "small"}),
    ("stages.rl.policy_loss", {"name": "ppo_clip", "coef": -1}),
    ("stages.rl.kl", {"estimator": "k9"}),
    ("stages.rl.kl", {"controller": {"name": "fixed", "beta": 0.1}}),
    ("stages.rl.generation.temperature", -0.5),
    ("stages.rl.optimizer.lr", 1.0e-5),
    ("stages.rl.optimizer.schedule", "cosin"),
    ("stages.rl.optimizer", {"name": "adam", "learning_rate": 1.0e-5}),
    ("stages.rl.optimizer.betas", [0.9]),
    ("stages.rl.environment", {"name": "tools", "tools": ["calculater"]}),
    ("stages.sft.loss_on", "user"),
    ("stages.sft.data", [{"file": "chats.jsonl"}]),
    ("stages.sft.lora", {"r": 16}),
]


@pytest.fixture(scope="module")
def validator(manager: PluginManager) -> Any:
    schema = json_schema(manager)
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(schema)


@pytest.mark.parametrize("name", sorted(shipped_configs()))
def test_every_shipped_config_fits(name: str, validator: Any) -> None:
    values, _ = read_yaml(shipped_configs()[name])
    assert [f"{e.json_path}: {e.message}" for e in validator.iter_errors(values)] == []


@pytest.mark.parametrize(("place", "value"), MISTAKES, ids=lambda item: str(item)[:40])
def test_a_mistake_is_refused_by_schema_and_by_validate(
    place: str, value: Any, validator: Any, manager: PluginManager, tmp_path: Path
) -> None:
    values = copy.deepcopy(BASE)
    here = values
    *sections, last = place.split(".")
    for section in sections:
        here = here.setdefault(section, {})
    assert validator.is_valid(values)
    here[last] = value
    assert not validator.is_valid(values)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError):
        resolve(load_config([path]), manager)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("model", "org/model"),
        ("engine", {"name": "transformers"}),
        ("stages.rl.rewards", "accuracy"),
        ("stages.rl.rewards", {"name": "accuracy", "weight": 2, "label": "right"}),
        ("stages.rl.policy_loss", [{"name": "ppo_clip", "coef": 0.5}, "ptx"]),
        ("stages.rl.rewards", ["my_rewards.py:Brief"]),
        ("stages.filter", {"kind": "my_stages.py:Filter", "count": 3}),
        ("stages.sft.data", "chats.jsonl"),
        ("stages.sft.data", [{"path": "chats.jsonl", "weight": 2}, "more.jsonl"]),
        ("stages.rl.inputs", {"model": "sft", "reward_model": "reward"}),
        ("stages.rl.critic", None),
        ("stages.rl.optimizer", {"name": "adamw", "weight_decay": 0.1, "schedule": "cosine"}),
    ],
)
def test_every_form_of_a_value_fits(place: str, value: Any, validator: Any) -> None:
    values = copy.deepcopy(BASE)
    here = values
    *sections, last = place.split(".")
    for section in sections:
        here = here[section]
    here[last] = value
    assert [e.message for e in validator.iter_errors(values)] == []


def test_every_plugin_of_a_config_is_in_it_with_its_fields(
    validator: Any, manager: PluginManager
) -> None:
    definitions = validator.schema["$defs"]
    kinds = definitions["stage"]["properties"]["kind"]["anyOf"][0]["enum"]
    assert kinds == [entry.name for entry in manager.entries("stage")]
    for entry in manager.entries():
        if entry.kind == "stage":
            continue
        found = [
            d for name, d in definitions.items() if name.endswith(f".{entry.kind}.{entry.name}")
        ]
        assert found, f"{entry.kind} {entry.name}"
        assert entry.cls.Config.model_fields.keys() <= found[0]["properties"].keys()
        assert found[0]["description"]


def test_the_command_prints_it_and_writes_it_with_the_line_for_editors(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["schema"])
    assert json.loads(shown.stdout)["$schema"].startswith("http://json-schema.org/draft-07")
    out = tmp_path / "new" / "posttrain.schema.json"
    shown = CliRunner().invoke(app, ["schema", "--out", str(out)])
    assert f"# yaml-language-server: $schema={out}" in shown.stdout
    assert json.loads(out.read_text())["title"] == "posttrain configuration"
