"""Trained weights go from the ranks to the servers of a cluster, and none through this process."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.core.cluster.shared import ServerPlaces
from posttrain.core.config.schema import RunConfig
from posttrain.core.contracts import Task
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import RunError
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.models.device import ModelRuntime
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.rollout.weight_sync import write_weights
from posttrain.core.training.sync_check import SyncCheck, make_probe
from posttrain.core.types import Artifact
from posttrain.pipelines.ranks.rl import RankedLearner, on_ranks
from posttrain.pipelines.ranks.trainer import RankTrainer
from posttrain.pipelines.stage.inputs import StageInputs
from posttrain.plugins.engines import vllm_server
from posttrain.plugins.engines.vllm_server import VllmServerConfig, VllmServerEngine
from tests.helpers import token_server
from tests.helpers.engines import make_setup
from tests.helpers.pipeline import tiny_config
from tests.helpers.ranks import nothing
from tests.helpers.speed import speed_batch

pytest.importorskip("ray", reason="Ray is not installed: pip install 'posttrain[ray]'")


class Traffic:
    """Bytes that this process has got out of Ray, and put into it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        from ray._private import serialization
        from ray._private.worker import Worker

        self.received = self.given = 0
        deserialize, serialize = (
            Worker.deserialize_objects,
            serialization.SerializationContext.serialize,
        )

        def counted(worker: Any, serialized: Any, *more: Any, **options: Any) -> Any:
            for data, metadata, *_ in serialized:
                self.received += (len(data) if data is not None else 0) + len(metadata or b"")
            return deserialize(worker, serialized, *more, **options)

        def weighed(context: Any, value: Any, *more: Any, **options: Any) -> Any:
            made = serialize(context, value, *more, **options)
            self.given += made.total_bytes
            return made

        patch.setattr(Worker, "deserialize_objects", counted)
        patch.setattr(serialization.SerializationContext, "serialize", weighed)

    @property
    def both(self) -> int:
        return self.received + self.given


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 MB of weights."""
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=256, layers=3)


@pytest.fixture(scope="module")
def trainer_and_learner(model: Path) -> Iterator[tuple[RankTrainer, RankedLearner]]:
    from posttrain.core.cluster.on_ray import connection

    connection.join("local", cpus=4)
    made: dict[str, Any] = tiny_config(model)
    rl = made["stages"]["rl"] | {"inputs": {"model": "base"}, "rewards": ["accuracy"]}
    rl["num_mini_batches"] = 1
    run = RunConfig.model_validate(
        made
        | {"stages": {"rl": rl}, "cluster": {}, "limits": {"learner_ranks": 2, "num_threads": 1}}
    )
    manager = PluginManager()
    stage: Any = StageInputs(
        run=run,
        name="rl",
        stage=run.stages["rl"],
        inputs={"model": Artifact("model", str(model), "0" * 64, "base")},
        manager=manager,
        task=manager.build(Task, run.task.name, run.task.fields()),
        runtime=ModelRuntime.from_config(run.model),
        check=nothing,
    )
    with RankTrainer(stage) as trainer:
        learner, *_ = on_ranks(stage, run.stages["rl"], trainer)  # type: ignore[arg-type]
        assert isinstance(learner, RankedLearner)
        yield trainer, learner
    connection.leave()


@pytest.fixture(scope="module")
def engine(
    model: Path,
    trainer_and_learner: tuple[RankTrainer, RankedLearner],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[VllmServerEngine]:
    folder = tmp_path_factory.mktemp("servers")
    arguments = [token_server.__file__, "--model", str(model), "--faults", str(folder)]
    arguments += ["--delay", "0"]
    variables = {"PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_server, "server_arguments", lambda *_, **__: arguments)
        patch.setattr(vllm_server, "server_variables", lambda *_: variables)
        engine = VllmServerEngine(VllmServerConfig())
        engine.start(replace(make_setup(model), places=ServerPlaces(2, 1, 0, start_timeout_s=60)))
        with contextlib.closing(engine):
            yield engine


def test_no_weight_passes_this_process_and_the_servers_have_those_of_the_ranks(
    engine: VllmServerEngine,
    trainer_and_learner: tuple[RankTrainer, RankedLearner],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    _, learner = trainer_and_learner
    source, fleet = learner.source, engine._fleet
    assert source is not None and fleet is not None
    traffic = Traffic(monkeypatch)
    learner.update(speed_batch(), 1, 0.0)
    updated, began = traffic.both, time.perf_counter()
    engine.sync_from(source, policy_version=1)
    took, passed = time.perf_counter() - began, traffic.both - updated
    held = fleet._held.weights
    assert held is not None and held.shared is not None
    assert held.shared.num_bytes > 4e6 > 40 * passed, "references and digests only"
    print(f"{held.shared.num_bytes} bytes to 2 servers in {took:.2f} s; {passed} passed the driver")

    before, copy = traffic.received, learner.model  # what the next line brings is seen
    assert traffic.received - before > 4e6
    weights = {n: t for n, t in copy.state_dict().items() if n not in engine._tied}
    assert write_weights(tmp_path, "w", weights, torch.float32).digest == held.digest


def test_the_check_of_a_sync_asks_the_ranks_for_log_probs(
    engine: VllmServerEngine,
    trainer_and_learner: tuple[RankTrainer, RankedLearner],
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, learner = trainer_and_learner
    probe = make_probe(ChatTokenizer.load(model), 64)
    here = SyncCheck(engine, learner.model, probe)
    there = SyncCheck(engine, learner.model, probe, "every", learner.source)
    traffic = Traffic(monkeypatch)
    torch.testing.assert_close(there.answers().trainer, here.answers().trainer, rtol=0, atol=1e-4)
    assert traffic.both < 50_000


def test_a_stop_ends_a_sync_and_weights_that_do_not_fit_reach_no_server(
    engine: VllmServerEngine,
    trainer_and_learner: tuple[RankTrainer, RankedLearner],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, learner = trainer_and_learner
    source, fleet = learner.source, engine._fleet
    assert source is not None and fleet is not None
    engine.sync_from(source, policy_version=2)
    held = fleet._held
    monkeypatch.setattr(engine, "_shapes", engine._shapes | {"model.extra": [1]})
    with pytest.raises(RunError, match="missing weight.*model.extra"):
        engine.sync_from(source, policy_version=3)
    assert fleet._held is held and engine.policy_version == 2
    monkeypatch.undo()

    def stop() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(source, "check", stop)
    with pytest.raises(KeyboardInterrupt):
        engine.sync_from(source, policy_version=3)
    with pytest.raises(RunError, match="the last weight sync failed"):
        engine.score([[1, 2]])
    monkeypatch.undo()
    engine.sync_from(source, policy_version=3)
    assert engine.score([[1, 2]])
