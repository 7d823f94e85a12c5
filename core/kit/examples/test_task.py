from posttrain.core.kit.checks import assert_keeps_contract
from posttrain.core.kit.examples.task import Example, ExampleConfig


def test_it_keeps_what_tasks_promise() -> None:
    assert_keeps_contract(Example)


def test_the_answer_is_the_next_number() -> None:
    task = Example(ExampleConfig())
    (problem,) = task.problems("held_out", 1, seed=0)
    assert int(problem.answer) == int(problem.key) + 1
    assert task.verify(problem, f" {problem.answer}\n").correct == 1.0
    assert task.verify(problem, problem.key).correct == 0.0
