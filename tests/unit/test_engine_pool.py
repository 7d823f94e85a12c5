"""How long a run keeps its engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from posttrain.core.config.schema import RunConfig
from posttrain.core.contracts import RolloutEngine
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.models.device import ModelRuntime
from posttrain.core.plugin_manager import PluginManager
from posttrain.pipelines.stage.engines import EnginePool
from tests.helpers.pipeline import tiny_config


@pytest.mark.parametrize("keeps", [True, False])
def test_an_engine_ends_with_the_last_stage_that_samples(
    tmp_path: Path, manager: PluginManager, keeps: bool
) -> None:
    folder = make_tiny_model(tmp_path / "model")
    made = tiny_config(folder)
    config = RunConfig.model_validate(made | {"limits": {"keep_engine": keeps}})
    pool = EnginePool(config, manager, ModelRuntime.from_config(config.model))
    engines: list[RolloutEngine[Any]] = []
    samples = [name for name, stage in config.stages.items() if stage.max_sequences() > 0]
    assert 1 < len(samples) < len(config.stages)
    for name in config.stages:
        if name in samples:
            with pool.lease(folder) as engine:
                engines.append(engine)
        pool.stage_ended(name)
    with pool.lease(folder) as engine:
        assert engine not in engines, "stopped after the last"
    pool.close()
    assert len(set(map(id, engines))) == (1 if keeps else len(samples))


def test_an_engine_that_another_stage_has_is_left_to_it(
    tmp_path: Path, manager: PluginManager
) -> None:
    folder = make_tiny_model(tmp_path / "model")
    made = tiny_config(folder)
    config = RunConfig.model_validate(made | {"limits": {"keep_engine": False}})
    pool = EnginePool(config, manager, ModelRuntime.from_config(config.model))
    with pool.lease(folder) as first:
        pool.stage_ended("evaluate_base")
        assert first.score([[1, 2, 3]])
    with pool.lease(folder) as second:
        assert second is first
    pool.close()
