from posttrain.core.kit.checks import assert_keeps_contract
from posttrain.core.kit.examples.rollout_engine import Example


def test_it_keeps_what_engines_promise() -> None:
    assert_keeps_contract(Example)
