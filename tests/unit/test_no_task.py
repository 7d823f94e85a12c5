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
from posttrain.core.plugin_manager import PluginManager
from posttrain.pipelines.run.checks import check_inputs
from tests.helpers.tiny import make_tiny_model

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
