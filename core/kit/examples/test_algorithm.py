from posttrain.core.contracts import NoConfig
from posttrain.core.kit.checks import assert_keeps_contract
from posttrain.core.kit.examples.algorithm import Example


def test_it_keeps_what_presets_promise() -> None:
    assert_keeps_contract(Example)


def test_it_has_no_kl_term() -> None:
    assert Example(NoConfig()).expand()["kl"] == {"controller": {"name": "fixed", "coef": 0.0}}
