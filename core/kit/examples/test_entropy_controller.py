from posttrain.core.kit.checks import assert_keeps_contract
from posttrain.core.kit.examples.entropy_controller import Example, ExampleConfig


def test_it_keeps_what_controllers_promise() -> None:
    assert_keeps_contract(Example)


def test_the_bonus_grows_with_what_is_missing() -> None:
    controller = Example(ExampleConfig(target=0.5, factor=0.1))
    controller.update(0.3)
    assert abs(controller.coefficient() - 0.02) < 1e-12
    controller.update(0.7)
    assert controller.coefficient() == 0.0
