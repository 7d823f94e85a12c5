"""Rewards are scored alike by workers of this machine and by those of a cluster's nodes.

What is lost on a node in the middle of it is scored elsewhere: every sample has its own score.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posttrain.core.contracts import NoConfig, PluginConfig, Reward
from posttrain.core.errors import ResourceError, RunError
from posttrain.core.rewards.pool import RewardPool
from posttrain.core.rewards.scoring import Pool
from posttrain.core.runtime.plugin_files import load_file
from posttrain.core.sandbox.model import SandboxSettings
from posttrain.core.types import Score
from tests.helpers.faulty_rewards import NONSENSE, FaultyConfig, FaultyReward, samples_of
from tests.helpers.two_nodes import TwoNodes

Made = Callable[..., Pool]


def on_nodes(
    local: RewardPool, warnings: list[str], check: Callable[[], None] = lambda: None, **more: Any
) -> Pool:
    """The pool on both nodes, with one worker each unless `more` says otherwise."""
    from posttrain.core.cluster.on_ray.pools import PoolResources, RayNodes
    from posttrain.core.rewards.on_nodes import WORKER, RewardsOnNodes, sharing

    resources = PoolResources(
        **{"section": "cluster.rewards", "cpus": 1, "nodes": None, "start_timeout_s": 30.0, **more}
    )
    share = sharing(local.limits, resources.cpus)
    nodes = RayNodes(WORKER, resources, share, warnings.append)
    return RewardsOnNodes(local, nodes, resources.cpus, warnings.append, check)


def local_pool(
    timeout_s: float = 5.0, check: Callable[[], None] = lambda: None, **settings: object
) -> RewardPool:
    reward = FaultyReward(FaultyConfig.model_validate(settings))
    return RewardPool([reward], workers=2, timeout_s=timeout_s, check=check)


@pytest.fixture(params=["here", "nodes"])
def make(request: pytest.FixtureRequest, nodes: TwoNodes) -> Made:
    def made(**settings: Any) -> Pool:
        local = local_pool(**settings)
        check = settings.get("check", lambda: None)
        return local if request.param == "here" else on_nodes(local, [], check)

    return made


def score(pool: Pool, texts: list[str]) -> list[Score]:
    (column,) = pool.score(samples_of(texts))
    return column


def soon(condition: Callable[[], object], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(condition())


# --- one suite over both -------------------------------------------------------------------------


def test_scores_keep_their_order_and_their_parts(make: Made) -> None:
    texts = [str(number) for number in range(300)] + ["unscored"]
    with make() as pool:
        for _ in range(2):
            found = score(pool, texts)
            assert [s.value for s in found] == [*map(float, range(300)), None]
            assert [s.detail for s in found[:300]] == [str(number) for number in range(300)]
            assert found[7].components == {"part": 7.0}
            assert [(s.end, s.correct) for s in found[12].steps] == [(2, 12.0)]
            assert found[300] == Score(None, "unscored", "nothing to say")
            assert pool.samples_per_s > 0


def test_harm_costs_its_own_sample(make: Made) -> None:
    harm = ["exit", "segfault", "sleep", "regex", "raise", "sys_exit", *NONSENSE]
    with make(timeout_s=0.6) as pool:
        found = score(pool, [text for kind in harm for text in ("1", kind, "2")])
        again = score(pool, ["3", "4"])
    assert [s.value for s in again] == [3.0, 4.0]
    assert {s.value for s in found[0::3]} == {1.0} and {s.value for s in found[2::3]} == {2.0}
    bad = dict(zip(harm, found[1::3], strict=True))
    assert {s.value for s in bad.values()} == {None}
    assert [bad[kind].status for kind in harm[:6]] == [
        *("crashed", "crashed", "timeout", "timeout", "error", "error")
    ]
    assert bad["exit"].detail == "its process ended with exit code 3"
    assert bad["sleep"].detail == "no score within 0.6 s"
    assert {bad[kind].status for kind in NONSENSE} == {"error"}


def test_a_stop_is_heard_while_a_sample_hangs(make: Made) -> None:
    stop = threading.Event()

    def check() -> None:
        if stop.is_set():
            raise KeyboardInterrupt

    with make(timeout_s=60.0, check=check) as pool:
        score(pool, ["1"])
        threading.Timer(0.3, stop.set).start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            score(pool, ["sleep", "regex", "1"])
        assert time.monotonic() - began < 10


def test_a_reward_that_cannot_be_built_stops_the_run(make: Made) -> None:
    with make(harm_in_worker="raise") as pool:
        with pytest.raises(RunError, match="building its rewards failed with ValueError"):
            score(pool, ["1"])


# --- what is lost --------------------------------------------------------------------------------

TEXTS = [str(number) for number in range(400)]


def assert_own(found: list[Score]) -> None:
    """Every sample has the score that it has undisturbed."""
    assert [s.value for s in found] == [float(text) for text in TEXTS]
    assert [s.detail for s in found] == TEXTS


def test_samples_of_a_killed_actor_are_scored_elsewhere(nodes: TwoNodes) -> None:
    warnings: list[str] = []
    with on_nodes(local_pool(work_s=0.01), warnings) as pool:
        score(pool, ["1"] * 8)
        actors = nodes.actors()
        assert len(actors) == 2
        below = actors[0].children(recursive=True)
        assert len(below) >= 2, "the server and its worker"
        threading.Timer(0.5, actors[0].kill).start()
        assert_own(score(pool, TEXTS))
        assert any("was lost" in text for text in warnings), warnings
        assert soon(lambda: not any(p.is_running() for p in below)), "its workers end with it"
        assert soon(lambda: len(nodes.actors()) == 2) or score(pool, ["1"])
        assert_own(score(pool, TEXTS))
        assert len(nodes.actors()) == 2, "it was replaced"
        assert not any("own machine" in text for text in warnings)
    assert soon(lambda: not nodes.actors())


# --- what nodes must have ------------------------------------------------------------------------


def test_a_cluster_without_room_is_one_sentence(nodes: TwoNodes) -> None:
    for more in ({"cpus": 64}, {"nodes": 3}):
        began = time.monotonic()
        pool = on_nodes(local_pool(), [], start_timeout_s=2.0, **more)
        with pytest.raises(ResourceError, match="no room for cluster.rewards on"), pool:
            pass
        assert time.monotonic() - began < 15
    assert not nodes.actors()


class Sandboxed(PluginConfig):
    """Settings with a sandbox in them."""

    sandbox: SandboxSettings = SandboxSettings(
        level="rlimits", min_level="rlimits", allow_weak=True
    )


class Weak(Reward[Sandboxed]):
    """R = 1."""

    name, Config = "weak", Sandboxed

    def score(self, samples: object) -> list[Score]:
        return [Score(1.0)]


@pytest.mark.slow
def test_a_node_with_a_weaker_sandbox_refuses(nodes: TwoNodes) -> None:
    from posttrain.core.cluster.on_ray.pools import PoolResources, RayNodes
    from posttrain.core.contracts.spec import Shipped
    from posttrain.core.rewards.node_worker import NodeRewards
    from posttrain.core.rewards.on_nodes import WORKER, sharing
    from posttrain.core.rewards.protocol import specs_of
    from posttrain.core.sandbox.required import isolations

    reward = Weak(Sandboxed())
    (needed,) = isolations("reward 'weak'", reward.config)
    assert needed.least == "rlimits"
    resources = PoolResources("cluster.rewards", 1, None, 30.0)
    pool = RayNodes(WORKER, resources, sharing([1.0], 1), lambda text: None)
    rewards = Shipped.of(specs_of([reward]), [replace(needed, least="namespaces")])
    setup = NodeRewards(rewards, b"", (1.0,), 1)
    said = r"node .*: programs of reward 'weak' would run in the sandbox rlimits, .* weaker than"
    with pytest.raises(ResourceError, match=said):
        pool.start(setup, lambda: None)


LOCAL = """
import near
from posttrain.core.contracts import NoConfig, Reward
from posttrain.core.types import Score

class Mine(Reward[NoConfig]):
    "R = the length."
    name, Config = "mine", NoConfig

    def score(self, samples):
        return [Score(near.value(sample.text)) for sample in samples]
"""


@pytest.mark.slow
def test_a_reward_in_a_local_file_is_sent_along(nodes: TwoNodes, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LOCAL)
    (tmp_path / "near.py").write_text("def value(text):\n    return float(len(text))\n")
    reward = load_file(tmp_path / "mine.py").Mine(NoConfig())
    with on_nodes(RewardPool([reward], workers=1), []) as pool:
        for path in tmp_path.glob("*.py"):
            path.unlink()  # nodes may not see the folder
        assert [s.value for s in score(pool, ["a", "abc"])] == [1.0, 3.0]


@pytest.mark.slow
def test_a_reward_that_nodes_do_not_have_is_one_sentence(
    nodes: TwoNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Weak, "__module__", "no_such_package.rewards")
    warnings: list[str] = []
    said = (
        r"cluster.rewards: 2 of the cluster's nodes cannot be used, and 1 is needed: node .*: "
        r"reward 'weak' is not installed there \(package no_such_package\)"
    )
    with RewardPool([Weak(Sandboxed())], workers=1) as local:
        with pytest.raises(ResourceError, match=said), on_nodes(local, warnings):
            pass
    assert len(warnings) == 2
