"""The rewriting of problems for integer answers, with scripted replies: what is kept, what not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from posttrain.core.contracts import Task
from posttrain.core.data.transformation import (
    REASONS,
    Outcome,
    Rewriting,
    Transformer,
    outcome_metrics,
    read_reply,
)
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.tracking.metric_names import check_names
from posttrain.core.types import Message, Problem

MANAGER = PluginManager()
SHAPE = Problem("shape", "Which shape?", "a square", "a square")
GOOD = "Sure.\nProblem: Which shape? How many sides has it?\nAnswer: 4"


@pytest.fixture
def task(tmp_path: Path) -> Task[Any]:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "Which shape?", "answer": "a square"}\n')
    return MANAGER.build(Task, "jsonl", {"path": str(path), "match": "exact"})


class Script:
    """Answers from a list: a rewriting as it stands, solutions as they stand."""

    def __init__(self, rewriting: str = GOOD, solutions: Sequence[str] = ("4",) * 4) -> None:
        self.rewriting, self.solutions = rewriting, solutions
        self.asked: list[tuple[str, int]] = []

    def ask(self, questions: Sequence[str], count: int) -> list[list[str]]:
        self.asked += [(question, count) for question in questions]
        return [list(self.solutions[:count]) if count else [self.rewriting] for _ in questions]


def run(
    task: Task[Any],
    problems: Sequence[Problem],
    script: Script,
    held_out: Sequence[str] = (),
    longest: int = 10_000,
    **fields: Any,
) -> list[Outcome]:
    settings = Rewriting("Rewrite {question} ({answer})", votes=4, agreement=0.5, **fields)
    found = Transformer(
        task, settings, script.ask, lambda text: len(text) <= longest, frozenset(held_out)
    ).transform(problems)
    assert all(len(question) <= longest for question, _ in script.asked)
    return found


def test_an_integer_passes_unchanged_and_asks_nobody(task: Task[Any]) -> None:
    script = Script()
    problem = Problem("k", "p", "1,080", "so 1,080", {"a": "b"})
    (outcome,) = run(task, [problem], script)
    assert outcome.made == problem and outcome.how == "unchanged" and not script.asked


def test_a_conversation_passes_with_its_messages_or_is_dropped(task: Task[Any]) -> None:
    script = Script()
    chat = (Message("system", "Be brief."), Message("user", "Find x."))
    whole, surd = (Problem(a, "p", a, a, messages=chat) for a in ("4", r"11-2\sqrt{6}"))
    kept, dropped = run(task, [whole, surd], script)
    assert kept.made == whole and kept.row()["messages"][0]["content"] == "Be brief."  # type: ignore[index]
    assert (dropped.reason, dropped.made, script.asked) == ("conversation", None, [])


def test_a_closed_form_is_rewritten_by_rule_and_judged_by_the_task(task: Task[Any]) -> None:
    script = Script()
    problem = Problem("k", "Find x.", r"11-2\sqrt{6}", r"11-2\sqrt{6}")
    (outcome,) = run(task, [problem], script)
    made = outcome.made
    assert made is not None and outcome.how == "rule" and not script.asked
    assert made.prompt.startswith("Find x. The answer can be written as k - m")
    assert made.answer == "19" and task.verify(made, "I think 19").correct == 1.0
    assert task.verify(made, "I think 18").correct == 0.0
    assert outcome.row()["original"] == {"prompt": "Find x.", "answer": r"11-2\sqrt{6}"}


def test_the_rest_is_rewritten_by_the_model_and_kept_when_its_solutions_agree(
    task: Task[Any],
) -> None:
    script = Script(solutions=["it is 4", "4", "5", "so 4"])
    (outcome,) = run(task, [SHAPE], script)
    made = outcome.made
    assert made is not None and outcome.how == "model" and outcome.agreement == 0.75
    assert (made.prompt, made.answer) == ("Which shape? How many sides has it?", "4")
    assert script.asked == [("Rewrite Which shape? (a square)", 0), (made.prompt, 4)]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (Script(solutions=["4", "4", "5", "6"]), "no_majority"),
        (Script("I cannot do that."), "unparsed"),
        (Script("Answer: 4\nProblem: How many sides?"), "unparsed"),
        (Script("Problem: How many sides?\nAnswer: four"), "not_integer"),
        (Script("Problem: How many sides?\nAnswer: 4.5"), "not_integer"),
        (Script("Problem: Which  shape?\nAnswer: 4"), "same_question"),
        (Script(f"Problem: {'x' * 200}\nAnswer: 4"), "too_long"),
    ],
)
def test_what_does_not_verify_is_dropped_with_its_reason(
    task: Task[Any], script: Script, reason: str
) -> None:
    (outcome,) = run(task, [SHAPE], script, longest=100)
    assert (outcome.made, outcome.reason) == (None, reason) and reason in REASONS
    assert outcome.row()["reason"] == reason


def test_a_prompt_without_room_and_an_answer_without_a_rule_are_dropped(task: Task[Any]) -> None:
    assert run(task, [SHAPE], Script(), longest=10)[0].reason == "too_long"
    script = Script()
    assert run(task, [SHAPE], script, by_model=False)[0].reason == "no_rule" and not script.asked
    half = Problem("h", "How much?", "1/2", "1/2")
    outcome = run(task, [half], Script("Problem: Twice that?\nAnswer: 1", ["1"] * 4), by_rule=False)
    assert outcome[0].how == "model"


def test_no_question_is_made_twice_and_none_that_is_held_out(task: Task[Any]) -> None:
    other = Problem("other", "What form?", "a square", "a square")
    outcomes = run(task, [SHAPE, other], Script())
    assert [outcome.reason for outcome in outcomes] == ["", "duplicate"]
    key = "Which shape? How many sides has it?"
    assert run(task, [SHAPE], Script(), held_out=[key])[0].reason == "held_out"


def test_a_task_whose_verifier_does_not_read_the_new_answer_keeps_nothing() -> None:
    digits = MANAGER.build(Task, "arithmetic", {"match": "exact"})
    spoken = Problem("k", "What is 4 + 4?", "eight", "eight")
    script = Script("Problem: What is 4 + 4, twice?\nAnswer: 16", ["16"] * 4)
    assert run(digits, [spoken], script)[0].how == "model"

    class Deaf(type(digits)):  # type: ignore[misc]  # a class that is known at run time only
        def verify(self, problem: Problem, text: str) -> Any:
            return super().verify(Problem("k", "p", text, text), text)  # everything is right

    deaf = Deaf(digits.config)
    assert run(deaf, [spoken], script)[0].reason == "verifier"


@pytest.mark.parametrize("name", ["reasoning_gym", "arithmetic", "digits"])
def test_tasks_that_generate_judge_a_rewritten_problem_by_its_answer(name: str) -> None:
    task = MANAGER.build(Task, name)
    made = task.rewritten("How many?", "19")
    assert task.verify(made, made.worked).correct == 1.0
    assert task.verify(made, "20").correct < 1.0


def test_the_last_complete_reply_is_read_and_hostile_text_takes_no_time() -> None:
    text = "**Problem:** a\n**Answer:** 1\nProblem: b\nmore\n\nAnswer: **$-3$**.\nProblem: c"
    assert read_reply(text) == ("b\nmore", "-3")
    assert read_reply("Problem:" + "\n" * 20_000) is None
    assert read_reply("problem:\n" * 5_000 + "answer:") is None
    assert read_reply("Problem: a\nAnswer:  ") is None


def test_counts_are_metrics_that_the_tracker_knows(task: Task[Any]) -> None:
    problems = [
        Problem("a", "a", "7", "7"),
        Problem("b", "b", "1/2", "1/2"),
        SHAPE,
        Problem("d", "d", "blue", "blue"),
    ]
    metrics = outcome_metrics(run(task, problems, Script()))
    check_names(metrics)
    assert metrics["transform/kept"] == 3 and metrics["transform/kept_frac"] == 0.75
    assert metrics["transform/by_unchanged"] == metrics["transform/by_rule"] == 1
    assert metrics["transform/by_model"] == metrics["transform/dropped/duplicate"] == 1
    assert metrics["transform/agreement"] == 1.0
