"""An adapted policy reaches the engine as an adapter where it can be one, and the check sees it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

from posttrain.core.config.loading import load_config
from posttrain.core.config.resolve import resolve
from posttrain.core.config.sections import LoraSection
from posttrain.core.contracts import RolloutEngine
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import RunError
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.models.device import ModelRuntime
from posttrain.core.models.loading import load_policy
from posttrain.core.models.lora import add_adapter
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.rollout.weight_sync import send_policy, takes_adapter, weights_sent
from posttrain.core.training.sync_check import SyncCheck, make_probe
from posttrain.pipelines.stage.engines import engine_fields
from posttrain.plugins.engines.transformers import TransformersEngine, TransformersEngineConfig
from tests.helpers.engines import make_setup

RUNTIME = ModelRuntime(torch.device("cpu"), torch.float32, "eager")


class WithoutAdapters(TransformersEngine):
    """An engine that only takes whole weights."""

    name = "without_adapters"
    sync_adapter = RolloutEngine.sync_adapter


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=[TransformersEngine, WithoutAdapters])
def check(request: pytest.FixtureRequest, folder: Path) -> Iterator[SyncCheck]:
    """Of an adapted policy whose engine has the weights that the stage began with."""
    engine: TransformersEngine = request.param(TransformersEngineConfig())
    engine.start(make_setup(folder))
    model = load_policy(folder, RUNTIME)
    add_adapter(model, LoraSection(rank=4), seed=1)
    yield SyncCheck(engine, model, make_probe(ChatTokenizer.load(folder), 256))
    engine.close()


def train(check: SyncCheck) -> None:
    """An optimizer step on some tokens."""
    trained = [p for p in check.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    ids = torch.randint(4, 90, (4, 20), generator=torch.Generator().manual_seed(1))
    check.model(ids, labels=ids).loss.backward()
    optimizer.step()


def test_the_engine_answers_with_the_adapter_after_each_sync(check: SyncCheck) -> None:
    knows = type(check.engine) is TransformersEngine
    assert takes_adapter(check.engine, check.model) == knows
    check.after("the start")
    for version in (1, 2):
        train(check)
        send_policy(check.engine, check.model, version)
        found = check.after(f"the sync of step {version}")
        assert found["sync/probe_abs_max"] < 1e-4
        assert found["sync/probe_change"] > 1e-3
        assert check.engine.policy_version == version


def test_an_adapter_that_was_not_sent_is_noticed(check: SyncCheck) -> None:
    check.after("the start")
    train(check)
    with pytest.raises(RunError, match="kept (its|some) old weights after the sync of step 1"):
        check.after("the sync of step 1")


def test_base_weights_that_differ_are_noticed_beside_a_right_adapter(check: SyncCheck) -> None:
    train(check)
    send_policy(check.engine, check.model, 1)
    name, tensor = next(iter(weights_sent(check.engine, check.model)))
    with torch.no_grad():
        tensor += 1e-3
    with pytest.raises(RunError, match=f"kept some old weights .*{name}"):
        check.after("the sync of step 1")


@pytest.mark.parametrize(("given", "found"), [(None, 4), (32, 32)])
def test_an_engine_makes_room_for_the_adapters_of_a_resolved_run(
    tmp_path: Path, given: int | None, found: int
) -> None:
    rl = {"kind": "rl", "inputs": {"model": "base"}, "algorithm": "grpo", "rewards": ["accuracy"]}
    stages = {"one": rl | {"lora": {"rank": 4}}, "two": rl | {"lora": {"rank": 2}}}
    path = tmp_path / "run.yaml"
    engine = {"name": "vllm", "max_lora_rank": given}
    run = {"name": "it", "engine": engine, "task": {"name": "arithmetic"}, "stages": stages}
    path.write_text(yaml.safe_dump(run))
    manager = PluginManager()
    config = resolve(load_config([path]), manager).config
    assert engine_fields(config, manager, "vllm")["max_lora_rank"] == found
