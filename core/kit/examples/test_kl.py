import torch

from posttrain.core.contracts import NoConfig
from posttrain.core.kit.checks import assert_keeps_contract
from posttrain.core.kit.examples.kl import Example


def test_it_keeps_what_estimators_promise() -> None:
    assert_keeps_contract(Example)


def test_a_value_by_hand() -> None:
    found = Example(NoConfig()).kl(torch.tensor([[-1.0]]), torch.tensor([[-3.0]]))
    assert found.tolist() == [[2.0]]
