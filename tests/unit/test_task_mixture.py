"""Several tasks as one: shares, judging, identity, and the sampler that follows progress."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from posttrain.core.contracts import (
    Component,
    PromptGroup,
    RolloutRequest,
    SampledGroup,
    Sampler,
    Task,
)
from posttrain.core.errors import DataError
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.types import TASK, Completion, Problem, SamplingParams, of_tasks
from tests.helpers.pipeline import run_command, write_config

MANAGER = PluginManager()
TWO = {"name": "digits", "places": 2, "repeats": 2, "label": "two"}
THREE = {"name": "digits", "places": 3, "repeats": 1}


def mixture(*tasks: dict[str, Any]) -> Task[Any]:
    return MANAGER.task(Component.model_validate({"name": "mixture", "tasks": list(tasks)}))


def test_every_stretch_of_the_problems_has_the_shares() -> None:
    task = mixture({**TWO, "weight": 3}, {**THREE, "weight": 1})
    problems = task.problems("train", 80, seed=0)
    for start in range(0, 80, 8):
        counts = Counter(p.metadata[TASK] for p in problems[start : start + 8])
        assert counts == {"two": 6, "digits": 2}
    # Those of one task are what it gives alone, in its order.
    alone = MANAGER.build(Task, "digits", {"places": 2, "repeats": 2}).problems("train", 60, 0)
    assert [p.prompt for p in problems if p.metadata[TASK] == "two"] == [p.prompt for p in alone]


def test_a_small_task_comes_again_in_training_and_not_among_the_held_out() -> None:
    task = mixture({**TWO, "places": 1}, THREE)  # some 9 numbers of one place, 900 of three
    alone = MANAGER.build(Task, "digits", {"places": 1, "repeats": 2})
    once, others = alone.available("train"), MANAGER.build(Task, "digits", {}).available("train")
    assert once is not None and others is not None
    assert task.available("train") == 2 * others
    problems = task.problems("train", 6 * once, seed=0)
    assert len({p.key for p in problems}) == len(problems)
    small = [p for p in problems if p.metadata[TASK] == "two"]
    assert Counter(p.prompt for p in small) == dict.fromkeys({p.prompt for p in small}, 3)
    for problem in problems:  # also of those that come again
        assert task.verify(problem, problem.worked).correct == 1.0
    held = task.available("held_out")
    assert held is not None
    kept = {p.prompt for p in task.problems("held_out", held, seed=0)}
    assert len(kept) == held and not kept & {p.prompt for p in problems}
    with pytest.raises(DataError, match="ask for fewer, or change the weights"):
        task.problems("held_out", held + 2, seed=0)


def test_each_problem_is_judged_by_its_own_task() -> None:
    task = mixture(TWO, THREE, {"name": "arithmetic"})
    for problem in task.problems("train", 30, seed=1):
        label = problem.metadata[TASK]
        assert task.verify(problem, problem.worked).correct == 1.0
        assert len(problem.answer) == {"two": 2, "digits": 1}.get(label, len(problem.answer))
        assert task.question(problem) in problem.prompt
    first = task.problems("train", 1, seed=0)[0]
    assert len(task.verify_steps(first, first.answer)) == 2


def test_what_is_no_mixture_is_one_sentence(tmp_path: Path) -> None:
    faults = {
        "a mixture holds no other mixture": [{"name": "mixture"}, TWO],
        "two tasks have one label": [TWO, {**THREE, "label": "two"}],
        "no task named 'digitz'": [{"name": "digitz"}],
        "places": [{**TWO, "places": 99}],
        "weight": [{**TWO, "weight": -1}],
    }
    for words, tasks in faults.items():
        done = validated(tmp_path, {"name": "mixture", "tasks": tasks})
        assert done.code == 2 and "Traceback" not in done.text, done.text
        assert words in " ".join(done.text.split()), done.text
    done = validated(tmp_path, {"name": "digits"}, sampler="progress")
    assert done.code == 2 and "chooses among several tasks" in " ".join(done.text.split())
    done = validated(tmp_path, {"name": "mixture", "tasks": [TWO, {"name": "episodes"}]})
    assert "the problems of task 'episodes' are judged by an environment" in " ".join(
        done.text.split()
    )


def validated(folder: Path, task: dict[str, Any], **rl: Any) -> Any:
    stage = {"kind": "rl", "inputs": {"model": "base"}, "steps": 2, **rl}
    made = {
        "name": "mixed",
        "engine": "transformers",
        "model": {"source": "org/model", "max_model_len": 512},
        "task": task,
        "stages": {"rl": stage},
    }
    path = write_config(folder / "run.yaml", made)
    return run_command("validate", str(path), "--home", str(folder / "unused"))


# --- progress ---------------------------------------------------------------------------------


@dataclass
class World:
    """Prompts of tasks a and b in turn; `rate` is the share of right responses, by task."""

    rate: Callable[[str], float]
    taken: int = 0
    chosen: list[Counter[str]] = field(default_factory=list)

    def take(self, count: int) -> list[PromptGroup]:
        numbers = range(self.taken, self.taken + count)
        self.taken += count
        return [
            PromptGroup(Problem(f"p{n}", "?", "", "", {TASK: "ab"[n % 2]}), (n,)) for n in numbers
        ]

    def generate(self, prompts: Any, params: SamplingParams) -> list[SampledGroup]:
        self.chosen.append(Counter(p.problem.metadata[TASK] for p in prompts))
        one = Completion((1,), (-0.1,), "stop", 0, 0, "script", "1")
        return [SampledGroup(prompt, (one,) * 10) for prompt in prompts]

    def verify(self, group: SampledGroup) -> list[float]:
        right = round(10 * self.rate(group.prompt.problem.metadata[TASK]))
        return [1.0] * right + [0.0] * (10 - right)

    def step(self, sampler: Sampler[Any], size: int = 10) -> dict[str, float]:
        request = RolloutRequest(
            engine=None,  # type: ignore[arg-type]
            prompts=self.take(size),
            params=SamplingParams(num_generations=10),
            policy_version=0,
            generate=self.generate,
            more_prompts=self.take,
            verify=self.verify,
            check=lambda: None,
        )
        return dict(sampler.sample(request).metrics)


def test_a_task_whose_pass_rate_changes_gets_more_and_the_others_keep_a_part() -> None:
    rates = {"a": 0.5, "b": 0.1}
    world, sampler = World(rates.__getitem__), MANAGER.build(Sampler, "progress", {"explore": 0.4})
    assert all(world.step(sampler)["progress/share/a"] == 0.5 for _ in range(3))
    for _ in range(4):  # b is being learned
        rates["b"] += 0.2
        metrics = world.step(sampler)
    assert world.chosen[-1] == {"a": 2, "b": 8}, "0.4 x 0.5 of ten stay a's"
    assert metrics["progress/change/b"] > 0.1 and metrics["progress/change/a"] == 0
    # 0.9 in the last step, after 0.7, 0.5, 0.3 and three times 0.1.
    fast, slow = 0.1, 0.1
    for rate in (0.3, 0.5, 0.7, 0.9):
        fast, slow = 0.5 * fast + 0.5 * rate, 0.9 * slow + 0.1 * rate
    assert metrics["progress/pass_rate/b"] == pytest.approx(fast)
    assert metrics["progress/change/b"] == pytest.approx(fast - slow)
    rates["a"] = 0.0  # a is forgotten
    world.step(sampler)
    assert world.step(sampler)["progress/share/a"] > 0.3


def test_what_it_remembers_goes_through_json() -> None:
    rates = {"a": 0.5, "b": 0.1}
    first, second = MANAGER.build(Sampler, "progress", {}), MANAGER.build(Sampler, "progress", {})
    world = World(rates.__getitem__)
    for _ in range(3):
        rates["b"] += 0.1
        world.step(first, size=7)
    second.load_state(json.loads(json.dumps(first.state())))
    other = World(rates.__getitem__, taken=world.taken)
    assert [world.step(first, size=7) for _ in range(4)] == [
        other.step(second, size=7) for _ in range(4)
    ]


def test_one_task_has_no_places() -> None:
    assert of_tasks([Problem("k", "?", "", "")]) == {}
