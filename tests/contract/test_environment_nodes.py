"""Environments answer alike in the run's process and on the nodes of a cluster.

What is lost on a node is answered elsewhere, and what fails everywhere is an error for the model.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from posttrain.core.contracts import Environment, NoConfig, Observation, Opening, Tool, Turn
from posttrain.core.errors import ResourceError, RunError
from posttrain.core.rollout.answers import AnswersHere
from posttrain.core.rollout.on_nodes import WORKER, AnswersOnNodes, sharing
from posttrain.core.runtime.plugin_files import load_file
from posttrain.core.types import Problem
from posttrain.plugins.environments.tools import ToolsConfig, ToolsEnvironment
from tests.helpers.node_tools import Single, Waiting, WaitingConfig
from tests.helpers.two_nodes import TwoNodes


def here(
    tool: type[Waiting] = Waiting, check: Callable[[], None] = lambda: None, **settings: Any
) -> AnswersHere:
    """An environment with one tool, in this process."""
    made: list[Tool[Any]] = [tool(WaitingConfig.model_validate(settings))]
    environment = ToolsEnvironment(ToolsConfig.model_validate({"tools": [tool.name]}))
    environment.setup(made)
    return AnswersHere(environment, made, check)


def on_nodes(
    local: AnswersHere,
    warnings: list[str],
    check: Callable[[], None] = lambda: None,
    timeout_s: float = 60.0,
    **more: Any,
) -> AnswersOnNodes:
    """The same on both nodes."""
    from posttrain.core.cluster.on_ray.pools import PoolResources, RayNodes

    given = {"section": "cluster.environments", "cpus": 1, "nodes": None, "start_timeout_s": 30.0}
    resources = PoolResources(**{**given, **more})  # type: ignore[arg-type]
    share = sharing(local.at_once, timeout_s)
    nodes = RayNodes(WORKER, resources, share, warnings.append)
    return AnswersOnNodes(local, nodes, local.at_once, warnings.append, check)


def called(arguments: Sequence[str], name: str = "waiting") -> list[tuple[object, Turn]]:
    """Steps that call the tool, each in a state of its own."""
    return [
        (number % 3, Turn(f"<{name}>{text}</{name}>", ended=False))
        for number, text in enumerate(arguments)
    ]


def texts(found: Sequence[Observation]) -> list[str]:
    return [o.text.removeprefix("<result>").removesuffix("</result>") for o in found]


@pytest.fixture(params=["here", "nodes"])
def answers(request: pytest.FixtureRequest, nodes: TwoNodes) -> Iterator[Any]:
    if request.param == "here":
        yield here()
        return
    with on_nodes(here(), []) as found:
        yield found


def test_answers_are_in_the_order_of_the_calls(answers: Any) -> None:
    numbers = [str(number) for number in range(200)]
    found = answers.to(called(numbers))
    assert texts(found) == [number * 2 for number in numbers]
    assert [o.state for o in found] == [number % 3 + 1 for number in range(200)]
    assert {(o.done, *sorted(o.counts.items())) for o in found} == {
        (False, ("calls", 1.0), ("failed", 0.0))
    }
    (over,) = answers.to([(0, Turn("it is 4", ended=True))])
    assert over.done and answers.to([]) == []


def test_a_call_that_fails_is_an_error_for_the_model(answers: Any) -> None:
    found = answers.to(called(["1", "never", "2"]))
    assert texts(found) == ["11", "error: the tool failed (OSError)", "22"]
    assert [o.counts["failed"] for o in found] == [0.0, 1.0, 0.0]


@pytest.mark.alone
@pytest.mark.slow
def test_a_thousand_calls_that_wait_cost_little_more_than_one(nodes: TwoNodes) -> None:
    numbers = [str(number) for number in range(1000)]
    local = here(seconds=0.5)
    with on_nodes(local, []) as pool:
        for answers in (local, pool):
            began = time.monotonic()
            assert texts(answers.to(called(numbers))) == [number * 2 for number in numbers]
            assert time.monotonic() - began < 20, "one after another they take 500 s"


@pytest.mark.slow
def test_a_tool_that_takes_one_call_at_a_time_gets_one(nodes: TwoNodes) -> None:
    local = here(Single, seconds=0.1)
    assert local.at_once == 1
    with on_nodes(local, []) as pool:
        pool.to(called(["1", "2"], "single"))
        began = time.monotonic()
        assert texts(pool.to(called(["3"] * 8, "single"))) == ["33"] * 8
        assert time.monotonic() - began >= 0.4, "two nodes, four each"
        assert len(set(texts(pool.to(called(["pid"] * 8, "single"))))) == 2


@pytest.mark.slow
def test_a_call_that_fails_on_a_node_is_tried_once_elsewhere(
    nodes: TwoNodes, tmp_path: Path
) -> None:
    with on_nodes(here(folder=tmp_path), []) as pool:
        found = pool.to(called(["1", "once a", "2", "never", "once b"]))
    assert texts(found) == [
        *("11", "once aonce a", "22", "error: the tool failed (OSError)", "once bonce b")
    ]
    pids = (tmp_path / "never").read_text().split()
    assert len(pids) == len(set(pids)) == 2, "once on each node"


@pytest.mark.slow
def test_calls_of_a_killed_actor_are_made_elsewhere(nodes: TwoNodes) -> None:
    warnings: list[str] = []
    numbers = [str(number) for number in range(300)]
    with on_nodes(here(seconds=0.5), warnings) as pool:
        pool.to(called(["1"] * 4))
        actors = nodes.actors()
        assert len(actors) == 2
        threading.Timer(0.2, actors[0].kill).start()
        assert texts(pool.to(called(numbers))) == [number * 2 for number in numbers]
        assert any("was lost" in text for text in warnings), warnings
    assert not any("own process" in text for text in warnings)


@pytest.mark.slow
def test_a_call_that_ends_its_process_is_found_and_costs_no_other_one(nodes: TwoNodes) -> None:
    warnings: list[str] = []
    numbers = ["1", "2", "3", "exit", "4", "5", "6", "7"]
    with on_nodes(here(), warnings) as pool:
        found = texts(pool.to(called(numbers)))
        again = texts(pool.to(called(["8"])))
    assert found[3] == "error: the tool failed (NodeLost)"
    assert found[:3] + found[4:] == ["11", "22", "33", "44", "55", "66", "77"]
    assert again == ["88"]


@pytest.mark.slow
def test_a_call_that_does_not_end_is_given_up(nodes: TwoNodes) -> None:
    warnings: list[str] = []
    with on_nodes(here(seconds=3600.0), warnings, timeout_s=0.5) as pool:
        began = time.monotonic()
        assert texts(pool.to(called(["1"]))) == ["error: the tool failed (NodeLost)"]
        assert time.monotonic() - began < 60
    assert any("did not answer in time" in text for text in warnings)


@pytest.mark.slow
def test_a_stop_is_heard_while_calls_wait(nodes: TwoNodes) -> None:
    stop = threading.Event()

    def check() -> None:
        if stop.is_set():
            raise KeyboardInterrupt

    local = here(check=check, seconds=3.0)
    with on_nodes(local, [], check) as pool:
        for answers in (local, pool):
            threading.Timer(0.3, stop.set).start()
            began = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                answers.to(called(["1", "2"]))
            assert time.monotonic() - began < 2.5
            stop.clear()


LOCAL = """
from dataclasses import dataclass
from posttrain.core.contracts import Environment, NoConfig, Observation, Opening

@dataclass(frozen=True)
class Seen:
    texts: tuple = ()

class Remembers(Environment[NoConfig]):
    "observation = the turns so far."
    name, Config = "remembers", NoConfig

    def reset(self, problem):
        return Opening(Seen())

    def step(self, state, turn):
        state = Seen((*state.texts, turn.text))
        return Observation(" ".join(state.texts), False, state)
"""


@pytest.mark.slow
def test_an_environment_in_a_local_file_has_states_of_its_own_classes(
    nodes: TwoNodes, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(LOCAL)
    environment = load_file(tmp_path / "mine.py").Remembers(NoConfig())
    state = environment.reset(Problem("1", "a", "b", "c")).state
    with on_nodes(AnswersHere(environment, ()), []) as pool:
        (tmp_path / "mine.py").unlink()
        (first,) = pool.to([(state, Turn("one", ended=False))])
        (second,) = pool.to([(first.state, Turn("two", ended=False))])
    assert second.text == "one two" and type(second.state) is type(state)


class Raises(Environment[NoConfig]):
    """observation = an error, which no environment should raise."""

    name, Config = "raises", NoConfig

    def reset(self, problem: Problem) -> Opening:
        return Opening(0)

    def step(self, state: object, turn: Turn) -> Observation:
        raise ValueError("no such state")


@pytest.mark.slow
def test_an_environment_that_raises_ends_the_run(nodes: TwoNodes) -> None:
    with on_nodes(AnswersHere(Raises(NoConfig()), ()), []) as pool:
        with pytest.raises(RunError, match="ValueError: no such state"):
            pool.to(called(["1"]))


@pytest.mark.slow
def test_a_tool_whose_files_nodes_do_not_have_is_one_sentence(
    nodes: TwoNodes, tmp_path: Path
) -> None:
    from posttrain.plugins.tools.search import SearchConfig, SearchTool

    path = tmp_path / "facts.txt"
    path.write_text("one\n")
    tool = SearchTool(SearchConfig(path=path))
    environment = ToolsEnvironment(ToolsConfig.model_validate({"tools": ["search"]}))
    environment.setup([tool])
    path.unlink()
    said = r"2 of the cluster's nodes cannot be used.*tool 'search': '.*' cannot be read"
    with pytest.raises(ResourceError, match=said):
        with on_nodes(AnswersHere(environment, [tool]), []):
            pass
