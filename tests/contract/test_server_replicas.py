"""Servers of an engine on this machine and behind actors: none answers with other weights.

The servers are real processes that start in a second (`tests/helpers/token_server.py`); vLLM's own
run in tests/contract/test_engines.py and tests/e2e/test_cluster_engines.py.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from posttrain.core.cluster.shared import ServerPlaces
from posttrain.core.errors import ResourceError, RunError
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.types import Completion, SamplingParams
from posttrain.plugins.engines import vllm_server
from posttrain.plugins.engines.vllm_server import VllmServerConfig, VllmServerEngine
from tests.helpers import token_server
from tests.helpers.engines import make_adapter, make_setup

SELDOM_ON_A_CLUSTER = pytest.mark.parametrize(
    "kind", ["here", pytest.param("cluster", marks=pytest.mark.slow)], indirect=True, scope="module"
)
"""What becomes of a server is decided above the way to it."""
ON_A_CLUSTER = pytest.mark.parametrize(
    "kind", [pytest.param("cluster", marks=pytest.mark.slow)], indirect=True, scope="module"
)
PROMPTS = [[5, 6, 7], [8, 9], [10]]
PARAMS = SamplingParams(num_generations=20, max_tokens=8, seed=3)
WAIT_S = 60


@pytest.fixture(scope="module", params=["here", pytest.param("cluster", marks=pytest.mark.slow)])
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "cluster":
        if find_spec("ray") is None:
            pytest.skip("Ray is not installed: pip install 'posttrain[ray]'")
        from posttrain.core.cluster.on_ray import connection

        connection.join("local", cpus=4)
    yield request.param
    if request.param == "cluster":
        connection.leave()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def weights(model: Path) -> dict[str, Tensor]:
    """Other weights than those that servers start with."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return {name: tensor + 1 for name, tensor in loaded.state_dict().items()}


@dataclass
class Fleet:
    """An engine with servers, and the folder where they say who they are and read their faults."""

    engine: VllmServerEngine
    folder: Path

    def pids(self) -> dict[int, int]:
        """Process ids of the servers by number; one that was started again has a new number."""
        found = self.folder.glob("server-*")
        return {int(p.name.rpartition("-")[2]): int(p.read_text()) for p in found if p.read_text()}

    def seeds(self) -> list[str]:
        """What was answered, by all servers together."""
        return "".join(path.read_text() for path in self.folder.glob("seeds-*")).split()

    def kill(self, number: int) -> None:
        os.kill(self.pids()[number], signal.SIGKILL)

    def give(self, number: int, fault: str) -> None:
        (self.folder / f"{fault}-{number}").touch()

    @property
    def alive(self) -> list[bool]:
        assert self.engine._fleet is not None
        return [replica.alive for replica in self.engine._fleet.replicas]

    def generate(self) -> list[list[Completion]]:
        return self.engine.generate(PROMPTS, PARAMS)


Start = Callable[..., Fleet]


@pytest.fixture
def start(
    kind: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Start]:
    started: list[Fleet] = []

    def begin(replicas: int = 2, restarts: int = 3, **config: object) -> Fleet:
        folder = tmp_path / f"fleet-{len(started)}"
        folder.mkdir()
        arguments = [token_server.__file__, "--model", str(model), "--faults", str(folder)]
        arguments += ["--delay", "0.02"]
        monkeypatch.setattr(vllm_server, "server_arguments", lambda *_, **__: arguments)
        variables = {"PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
        monkeypatch.setattr(vllm_server, "server_variables", lambda *_: variables)
        setup, fields = make_setup(model, batch=8), {"restarts": restarts, **config}
        if kind == "cluster":
            setup = replace(setup, places=ServerPlaces(replicas, 1, 0, start_timeout_s=60))
        else:
            fields["replicas"] = replicas
        engine = VllmServerEngine(VllmServerConfig.model_validate(fields | {"max_lora_rank": 8}))
        fleet = Fleet(engine, folder)
        started.append(fleet)
        engine.start(setup)
        return fleet

    yield begin
    for fleet in started:
        pids = fleet.pids()
        fleet.engine.close()
        assert not any(map(psutil.pid_exists, pids.values())), "no server outlives its engine"


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def test_a_server_killed_at_work_loses_no_answer_and_comes_back_with_the_present_weights(
    start: Start, weights: dict[str, Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    fleet = start()
    fleet.engine.sync_weights(weights.items(), policy_version=4)
    whole = fleet.generate()
    before = fleet.seeds()
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(fleet.generate)
        wait_for(lambda: len(fleet.seeds()) > len(before) + 5)
        fleet.kill(0)
        assert future.result(timeout=WAIT_S) == whole, "nothing lost, nothing twice"
    assert "is lost" in caplog.text
    wait_for(lambda: all(fleet.alive))
    back = "is back, with the weights of the others (restart 1 of 3)"
    wait_for(lambda: back in caplog.text)  # a little later
    assert len(fleet.pids()) == 3
    answered = (
        len((fleet.folder / "seeds-2").read_text()) if (fleet.folder / "seeds-2").exists() else 0
    )
    assert fleet.generate() == whole
    assert len((fleet.folder / "seeds-2").read_text()) > answered, "it is asked again"
    fleet.engine.sync_weights(((n, w + 1) for n, w in weights.items()), policy_version=5)
    after = fleet.generate()
    assert {c.policy_version for group in after for c in group} == {5}
    assert all(
        a.token_ids != b.token_ids for a, b in zip(sum(after, []), sum(whole, []), strict=True)
    )


@SELDOM_ON_A_CLUSTER
def test_when_all_servers_are_lost_the_run_waits_for_them(
    start: Start, weights: dict[str, Tensor]
) -> None:
    fleet = start()
    fleet.engine.sync_weights(weights.items(), policy_version=1)
    whole = fleet.generate()
    for number in (0, 1):
        fleet.kill(number)
    assert fleet.generate() == whole
    for number in fleet.pids():
        if psutil.pid_exists(fleet.pids()[number]):
            fleet.kill(number)
    fleet.engine.sync_weights(weights.items(), policy_version=2)
    again = fleet.generate()
    assert [[c.token_ids for c in g] for g in again] == [[c.token_ids for c in g] for g in whole]


@SELDOM_ON_A_CLUSTER
def test_a_server_that_dies_again_and_again_is_given_up(start: Start) -> None:
    fleet = start(replicas=1, restarts=1)
    for number in (0, 1):
        wait_for(lambda: all(fleet.alive))
        fleet.kill(number)
        if number == 0:
            fleet.generate()
    with pytest.raises(RunError, match="no vLLM server is left"):
        fleet.generate()


@SELDOM_ON_A_CLUSTER
def test_one_that_refuses_weights_is_left_out_and_starts_again_with_them(
    start: Start, weights: dict[str, Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    fleet = start()
    fleet.give(1, "refuse")
    fleet.engine.sync_weights(weights.items(), policy_version=1)
    assert "is lost" in caplog.text and "has the digest" in caplog.text
    whole = fleet.generate()
    wait_for(lambda: all(fleet.alive))
    assert fleet.generate() == whole


@SELDOM_ON_A_CLUSTER
def test_when_all_refuse_the_engine_answers_no_more_until_a_sync(
    start: Start, weights: dict[str, Tensor]
) -> None:
    fleet = start()
    for number in (0, 1):
        fleet.give(number, "refuse")
    with pytest.raises(RunError, match=r"failed at 2 of 2 vLLM server\(s\)"):
        fleet.engine.sync_weights(weights.items(), policy_version=1)
    with pytest.raises(RunError, match="the last weight sync failed"):
        fleet.generate()
    for number in (0, 1):
        (fleet.folder / f"refuse-{number}").unlink()
    fleet.engine.sync_weights(weights.items(), policy_version=1)
    assert all(fleet.alive) and fleet.generate()


@SELDOM_ON_A_CLUSTER
def test_one_that_answers_otherwise_than_most_is_left_out(
    start: Start, weights: dict[str, Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    fleet = start(replicas=3, restarts=0)
    fleet.give(2, "odd")
    fleet.engine.sync_weights(weights.items(), policy_version=1)
    assert "nats on the same tokens" in caplog.text and fleet.alive.count(True) == 2
    fleet.give(0, "odd")  # of two that differ nobody knows which is right
    with pytest.raises(RunError, match="one of them has other weights"):
        fleet.engine.sync_weights(weights.items(), policy_version=2)


@SELDOM_ON_A_CLUSTER
def test_one_that_returns_with_other_answers_is_not_asked(
    start: Start, weights: dict[str, Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    fleet = start(restarts=1)
    fleet.engine.sync_weights(weights.items(), policy_version=1)
    fleet.give(2, "odd")  # what the next server will be
    fleet.kill(0)
    whole = fleet.generate()
    wait_for(lambda: "answers with other weights than the others" in caplog.text)
    assert fleet.alive.count(True) == 1 and fleet.generate() == whole


@SELDOM_ON_A_CLUSTER
def test_an_adapter_reaches_all_servers_and_one_that_returns(
    start: Start, model: Path, weights: dict[str, Tensor], tmp_path: Path
) -> None:
    fleet = start()
    plain = fleet.generate()
    make_adapter(tmp_path / "adapter", model, seed=1)
    fleet.engine.sync_adapter(tmp_path / "adapter", policy_version=1)
    adapted = fleet.generate()
    assert adapted != plain
    fleet.kill(0)
    assert fleet.generate() == adapted
    wait_for(lambda: all(fleet.alive))
    assert fleet.generate() == adapted
    fleet.engine.sync_weights(weights.items(), policy_version=2)
    assert fleet.generate() not in (plain, adapted)


@ON_A_CLUSTER
def test_servers_for_which_there_is_no_room_are_one_sentence(kind: str, model: Path) -> None:
    places = ServerPlaces(replicas=9, cpus=1, gpus=0, start_timeout_s=1)
    engine = VllmServerEngine(VllmServerConfig())
    with pytest.raises(
        ResourceError, match="no room for 9 vLLM servers with 1 CPU each within 1 s"
    ):
        engine.start(replace(make_setup(model), places=places))
    engine.close()


@ON_A_CLUSTER
def test_an_actor_that_is_killed_takes_its_server_with_it_and_both_come_back(
    kind: str, start: Start, weights: dict[str, Tensor]
) -> None:
    fleet = start()
    fleet.engine.sync_weights(weights.items(), policy_version=1)
    whole = fleet.generate()
    actor = next(
        parent
        for parent in psutil.Process(fleet.pids()[0]).parents()
        if "ServerActor" in " ".join(parent.cmdline())
    )
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(fleet.generate)
        time.sleep(0.1)
        actor.kill()
        assert future.result(timeout=WAIT_S) == whole
    wait_for(lambda: all(fleet.alive))
    assert fleet.generate() == whole
    assert not list(Path("/dev/shm").glob("posttrain-files-*")), "no weights stay in memory"


def test_what_servers_leave_of_the_nodes_is_what_ranks_have() -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'posttrain[ray]'")
    from posttrain.core.cluster.on_ray.connection import Node, room, without

    nodes = [Node("a", 4, 2), Node("b", 8, 1)]
    one = {"CPU": 1.0, "GPU": 1.0}
    assert room(one, nodes) == 3
    assert without(one, 2, nodes) == [Node("a", 2, 0), Node("b", 8, 1)]
    assert without(one, 3, nodes) == [Node("a", 2, 0), Node("b", 7, 0)]
    assert without({"CPU": 3.0}, 2, nodes) == [Node("a", 1, 2), Node("b", 5, 1)]
