import torch

from posttrain.core.kit.checks import assert_keeps_contract
from posttrain.core.kit.examples.optimizer import Example, ExampleConfig


def test_it_keeps_what_optimizers_promise():
    assert_keeps_contract(Example)


def test_a_step_by_hand():
    weight = torch.tensor([1.0, 2.0], requires_grad=True)
    weight.grad = torch.tensor([3.0, -0.5])
    Example(ExampleConfig()).build([weight], 0.1, 0).step()
    torch.testing.assert_close(weight.detach(), torch.tensor([0.9, 2.1]))
