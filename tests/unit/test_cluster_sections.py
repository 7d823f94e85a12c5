"""Pools on nodes that would have nothing to do are refused before a run begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from posttrain.core.errors import ConfigError
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.pipelines.run.checks import check_pools, resolve_configs
from tests.helpers.pipeline import tiny_config, write_config

ENVIRONMENT = {"name": "tools", "tools": ["calculator"]}
IN_WORKERS = ["accuracy", "reward_model", {"name": "format", "pattern": "1"}]


@pytest.mark.parametrize(
    ("cluster", "rl", "said"),
    [
        ({}, {}, ""),
        ({"rewards": {}}, {"rewards": IN_WORKERS}, ""),
        ({"rewards": {}}, {}, "no reward of this run is scored in workers"),
        ({"environments": {}}, {}, "no stage of this run has an environment"),
        ({"environments": {}}, {"environment": ENVIRONMENT}, ""),
    ],
)
def test_a_pool_has_something_to_do(
    tmp_path: Path, cluster: dict[str, Any], rl: dict[str, Any], said: str
) -> None:
    config = tiny_config(make_tiny_model(tmp_path / "model"))
    config["stages"]["rl"] |= rl
    path = write_config(tmp_path / "run.yaml", config | {"cluster": cluster})
    resolved, manager = resolve_configs([path], None)
    if said:
        with pytest.raises(ConfigError, match=said):
            check_pools(resolved, manager)
    else:
        assert check_pools(resolved, manager) == []


def test_a_tool_that_takes_fewer_calls_is_noted(tmp_path: Path) -> None:
    config = tiny_config(make_tiny_model(tmp_path / "model"))
    config["stages"]["rl"]["environment"] = ENVIRONMENT
    cluster = {"environments": {"at_once": 2000}}
    path = write_config(tmp_path / "run.yaml", config | {"cluster": cluster})
    (note,) = check_pools(*resolve_configs([path], None))
    assert "at_once is 2000, but tool 'calculator' takes 1 at a time on each node" in note
