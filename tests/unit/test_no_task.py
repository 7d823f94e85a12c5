"""A config without `task`: enough where stages bring their data, else refused in a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain.core.config.loading import load_config
from posttrain.core.config.resolve import ResolvedRun, resolve
from posttrain.core.errors import ConfigError
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.plugin_manager import PluginManager
from posttrain.pipelines.run.checks import check_inputs

MANAGER = PluginManager()


def resolved(folder: Path, **stages: dict[str, Any]) -> ResolvedRun:
    path = folder / "run.yaml"
    model = {"source": str(folder / "model"), "dtype": "float32"}
    whole = {name: {"inputs": {"model": "base"}, **stage} for name, stage in stages.items()}
    path.write_text(yaml.safe_dump({"model": model, "stages": whole}))
    return resolve(load_config([path]), MANAGER)


def test_preferences_of_a_file_need_no_task(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model")
    data = str(tmp_path / "pairs.jsonl")
    rows = [{"prompt": f"q{n}", "chosen": "yes", "rejected": "no"} for n in range(10)]
    Path(data).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = resolved(
        tmp_path,
        dpo={"kind": "preference", "data": data},
        rm={"kind": "reward_model", "data": data},
    )
    assert check_inputs(found, MANAGER).problems == {}
    again = tmp_path / "again.yaml"
    again.write_text(found.to_yaml())
    assert resolve(load_config([again]), MANAGER).config == found.config


@pytest.mark.parametrize(
    "stage",
    [
        {"kind": "sft"},
        {"kind": "evaluate"},
        {"kind": "rl", "rewards": ["accuracy"]},
        {"kind": "preference"},
        {"kind": "preference", "data": "task"},
        {"kind": "reward_model"},
        {"kind": "transform"},
        {"kind": "new_data", "inputs": {}},
    ],
    ids=str,
)
def test_a_stage_that_needs_problems_says_so(tmp_path: Path, stage: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"needs problems.*no `task`; add one, such as `task: "):
        resolved(tmp_path, mine=stage)


def test_rewards_that_need_answers_are_refused_where_the_rows_have_none(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model")
    rows = [{"prompt": [{"role": "user", "content": f"Tell {n}."}]} for n in range(40)]
    data = tmp_path / "prompts.json"
    data.write_text(json.dumps(rows))
    path = tmp_path / "run.yaml"

    def inputs(*rewards: object) -> tuple[str, ...]:
        model = {"source": str(tmp_path / "model"), "dtype": "float32"}
        stage = {"kind": "rl", "inputs": {"model": "base"}, "rewards": list(rewards)}
        task = {"name": "rows", "path": str(data)}
        path.write_text(yaml.safe_dump({"model": model, "task": task, "stages": {"rl": stage}}))
        return check_inputs(resolve(load_config([path]), MANAGER), MANAGER).notes

    for reward in ("accuracy", "exact_match", "math_accuracy", "dapo_rule"):
        with pytest.raises(
            ConfigError,
            match=rf"stages.rl.rewards.1: '{reward}' compares with .*"
            r"prompts.json:1 has none that a verifier reads; add answers",
        ):
            inputs({"name": "format", "pattern": "a"}, reward)
    notes = inputs({"name": "format", "pattern": "a"})
    assert any("accuracies count such problems as wrong" in note for note in notes)


def test_in_a_mixture_each_reward_scores_the_tasks_that_it_can_judge(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model")
    data = tmp_path / "prompts.json"
    data.write_text(
        json.dumps([{"prompt": [{"role": "user", "content": f"Tell {n}."}]} for n in range(40)])
    )
    tasks = [
        {"name": "arithmetic", "label": "sums"},
        {"name": "rows", "path": str(data), "label": "talk"},
    ]

    def check(*rewards: object, **fields: object) -> object:
        stage = {"kind": "rl", "inputs": {"model": "base"}, "rewards": list(rewards), **fields}
        config = {
            "model": {"source": str(tmp_path / "model"), "dtype": "float32"},
            "task": {"name": "mixture", "tasks": tasks},
            "stages": {"rl": stage},
        }
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
        return check_inputs(resolve(load_config([tmp_path / "run.yaml"]), MANAGER), MANAGER)

    form = {"name": "format", "pattern": "a"}
    verifier, other = {"name": "accuracy", "tasks": ["sums"]}, {**form, "tasks": ["talk"]}
    check(verifier, other)
    check(verifier, form)
    for words, rewards in {
        r"rewards.0: 'accuracy' compares .*prompts.json:1 has none.*name the tasks that have": (
            ["accuracy", other]
        ),
        r"rewards.1.tasks: no task of the mixture is called 'tlak' \(\['sums', 'talk'\]\)": (
            [verifier, {**form, "tasks": ["tlak"]}]
        ),
        r"rl.rewards: none scores answers to problems of task 'talk'": [verifier],
        r"none scores answers to problems of task 'talk', so": [verifier, {**other, "weight": 0}],
    }.items():
        with pytest.raises(ConfigError, match=words):
            check(*rewards)
    for sampler in ("dynamic", "curriculum", "progress", "replay"):
        with pytest.raises(ConfigError, match=rf"rl.sampler: '{sampler}' chooses by how many"):
            check(verifier, other, sampler=sampler)
