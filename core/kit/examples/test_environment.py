from posttrain.core.contracts import Turn
from posttrain.core.kit.checks import assert_keeps_contract
from posttrain.core.kit.examples.environment import Example, ExampleConfig
from posttrain.core.types import Problem


def test_it_keeps_what_environments_promise() -> None:
    assert_keeps_contract(Example)


def test_an_episode_by_hand() -> None:
    environment = Example(ExampleConfig(max_hints=1))
    opening = environment.reset(Problem("k", "1 + 1?", "2", "2"))
    hint = environment.step(opening.state, Turn("<hint/>", ended=False))
    assert hint.text == "\nThe answer has 1 characters.\n" and not hint.done
    assert environment.step(hint.state, Turn("<hint/>", ended=False)).done
    assert environment.step(opening.state, Turn("2", ended=True)).done
