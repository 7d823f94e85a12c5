from posttrain.core.kit.checks import assert_keeps_contract
from posttrain.core.kit.examples.kl_controller import Example, ExampleConfig


def test_it_keeps_what_controllers_promise() -> None:
    assert_keeps_contract(Example)


def test_it_moves_against_the_error() -> None:
    controller = Example(ExampleConfig(coef=1.0, target=0.05, step=0.5))
    controller.update(kl_per_token=1.0, kl_per_sequence=9.0, num_rows=4)
    assert controller.coefficient() == 1.5
    controller.update(kl_per_token=0.0, kl_per_sequence=0.0, num_rows=4)
    assert controller.coefficient() == 0.75
