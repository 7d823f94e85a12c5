"""The package verifiers itself: its tasksets are listed and played, and the gateway records."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from posttrain.core.contracts import PromptGroup
from posttrain.core.errors import ConfigError
from posttrain.core.gateway.runner import PlayedRunner
from posttrain.core.rollout.plays import EpisodeLimits
from posttrain.core.types import Completion, Problem, SamplingParams
from posttrain.plugins.environments.verifiers import VerifiersConfig, VerifiersEnvironment
from posttrain.plugins.tasks.verifiers import VerifiersTask, VerifiersTaskConfig
from tests.helpers.gateway import Script, chat_tokenizer
from tests.helpers.verifiers_sets import write_sums
from tests.unit.test_docs_site import FENCE

pytestmark = pytest.mark.slow
PAGE = Path(__file__).resolve().parents[2] / "docs" / "environments.md"


class Submit(Script):
    """A script in the place of an engine."""

    engine: Any = type("Engine", (), {"policy_version": 0, "name": "script"})


def call(a: int, b: int) -> str:
    arguments = f'{{"b": {b}, "a": {a}}}'  # as no template writes it
    return f'<tool_call>\n{{"arguments":  {arguments}, "name": "adder_add"}}\n</tool_call>'


def problems_of(python: str, path: Path) -> list[Problem]:
    """All tasks of a taskset, in its order."""
    task = VerifiersTask(VerifiersTaskConfig(python=python, path=str(path)))
    found = task.problems("train", task.available("train") or 0, 0)
    found += task.problems("held_out", task.available("held_out") or 0, 0)
    return sorted(found, key=lambda problem: int(problem.metadata["index"]))


def played(
    python: str,
    path: Path,
    lines: list[str],
    numbers: list[int],
    *,
    episode_s: float = 60,
    **more: Any,
) -> tuple[list[list[Completion]], Submit]:
    """Episodes of the tasks with these numbers, at once; the policy says `lines` one by one."""
    config = VerifiersConfig(python=python, path=str(path), **more)
    script = Submit(chat_tokenizer(), lines)
    limits = EpisodeLimits(16, episode_s, 60, 0.0, 100_000)
    runner = PlayedRunner(VerifiersEnvironment(config), chat_tokenizer(), limits, 16)
    problems, params = problems_of(python, path), SamplingParams(max_tokens=500)

    async def all_of() -> list[list[Completion]]:
        prompts = [PromptGroup(problems[number], (1,)) for number in numbers]
        work = [runner._limited(script, prompt, params, 1) for prompt in prompts]
        return await asyncio.gather(*work)

    runner._start()
    try:
        rows = asyncio.run_coroutine_threadsafe(all_of(), runner.loop).result(200)
    finally:
        runner.close()
    return rows, script


def test_episodes_are_scored_by_verifiers_and_recorded_as_sampled(
    verifiers_python: str, tmp_path: Path
) -> None:
    path = write_sums(tmp_path)
    rows, script = played(verifiers_python, path, ["it is  0"], [0, 4, 0])
    assert [row[0].failed for row in rows] == [""] * 3
    assert [row[0].reward for row in rows] == [0.75, 0.25, 0.75]
    assert {row[0].token_ids for row in rows} == {script.given[0]}
    assert rows[0][0].counts["metric/letters"] == len("it is  0")
    assert rows[0][0].counts["reward/right"] == 0.5


def test_a_conversation_with_a_tool_is_one_row(verifiers_python: str, tmp_path: Path) -> None:
    path = write_sums(tmp_path, "tool")
    rows, script = played(verifiers_python, path, [call(3, 1), "it is  4"], [7])
    (row,) = rows[0]
    assert (row.failed, row.reward, len(row.turn_ends)) == ("", 0.75, 2)
    assert row.counts["metric/continued"] == 1 and not row.counts["altered"]
    assert sum(row.sampled) == sum(map(len, script.given))
    assert "4" in chat_tokenizer().tokenizer.decode(row.token_ids)


def test_the_taskset_of_the_page_shares_one_tool_server(
    verifiers_python: str, tmp_path: Path
) -> None:
    (text,) = [t for kind, t in FENCE.findall(PAGE.read_text("utf-8")) if "vf.Taskset" in t]
    path = tmp_path / "sums.py"
    path.write_text(text)
    rows, _ = played(verifiers_python, path, [call(4, 3), "7"], [4])
    assert [(row.failed, row.reward) for row in rows[0]] == [("", 1.0)]
    began = time.monotonic()
    rows, _ = played(verifiers_python, path, ["none"], [*range(16)])
    print(f"16 episodes with a shared tool server: {time.monotonic() - began:.1f} s with its start")
    assert {row[0].reward for row in rows} == {0.0}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            "dead tool",
            "tool server 'adder' ended with exit code 1 within 20 s of its start: no lic",
        ),
        ("deaf tool", "tool server 'adder' did not answer within 20 s of its start"),
        ("broken reward", "ZeroDivisionError: no such number"),
        ("killed", "the worker of verifiers ended by signal 9"),
        ("blocking reward", "the episode took more than 8 s"),
    ],
)
def test_a_planted_fault_fails_its_episode_with_a_reason(
    verifiers_python: str, tmp_path: Path, kind: str, words: str
) -> None:
    path = write_sums(tmp_path, kind)
    more = {"start_s": 20.0} if "tool" in kind else {}
    limit = 8.0 if kind == "blocking reward" else 60.0
    rows, _ = played(verifiers_python, path, ["1"], [1], episode_s=limit, **more)
    assert words in rows[0][0].failed and rows[0][0].reward is None


def test_a_tool_that_hangs_is_an_error_that_the_model_reads(
    verifiers_python: str, tmp_path: Path
) -> None:
    path = write_sums(tmp_path, "hanging tool")
    rows, _ = played(verifiers_python, path, [call(3, 1), "4"], [7], timeout_s=0.5)
    (row,) = rows[0]
    assert (row.failed, row.reward) == ("", 0.75)
    assert "error: the call took more than 0.5 s" in chat_tokenizer().tokenizer.decode(
        row.token_ids
    )


def test_a_worker_that_died_is_started_again(verifiers_python: str, tmp_path: Path) -> None:
    path = write_sums(tmp_path, "killed")
    config = VerifiersConfig(python=verifiers_python, path=str(path))
    environment = VerifiersEnvironment(config)
    script = Submit(chat_tokenizer(), ["2"])
    limits = EpisodeLimits(16, 60, 60, 0.0, 100_000)
    runner = PlayedRunner(environment, chat_tokenizer(), limits, 16)
    problems, params = problems_of(verifiers_python, path), SamplingParams(max_tokens=500)

    def one(number: int) -> Completion:
        made = runner._limited(script, PromptGroup(problems[number], (1,)), params, 1)
        return asyncio.run_coroutine_threadsafe(made, runner.loop).result(100)[0]

    runner._start()
    try:
        assert "signal 9" in one(1).failed
        assert one(2).reward == 0.75
    finally:
        runner.close()


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        ("plain", {"taskset": "products"}, "there is no taskset 'products' (there are: sums, "),
        ("plain", {"args": {"counts": 3}}, "refuses its settings: taskset.counts: Extra inputs"),
        ("plain", {"args": {"count": 0}}, "taskset 'sums' has no tasks"),
        ("offline", {}, "asks for the network, which it cannot reach"),
        ("endless", {}, "taskset 'sums' has no end: set task.limit"),
    ],
)
def test_a_taskset_that_cannot_be_listed_is_one_sentence(
    verifiers_python: str, tmp_path: Path, kind: str, fields: dict[str, Any], words: str
) -> None:
    path = write_sums(tmp_path, kind)
    given = {"python": verifiers_python, "path": str(tmp_path if "taskset" in fields else path)}
    with pytest.raises(ConfigError) as raised:
        VerifiersTask(VerifiersTaskConfig(**given, **fields))
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_an_edited_taskset_is_another_one(verifiers_python: str, tmp_path: Path) -> None:
    path = write_sums(tmp_path)
    config = VerifiersTaskConfig(python=verifiers_python, path=str(path), limit=10)
    first = VerifiersTask(config)
    assert first.fingerprint() == VerifiersTask(config).fingerprint()
    path.write_text(path.read_text().replace("weight=0.5", "weight=0.6"))
    assert first.fingerprint() != VerifiersTask(config).fingerprint()
    train, held_out = (first.available(split) for split in ("train", "held_out"))
    assert (train or 0) + (held_out or 0) == 10
