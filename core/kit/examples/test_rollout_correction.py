import torch

from posttrain.core.kit.checks import assert_keeps_contract
from posttrain.core.kit.examples.rollout_correction import Example, ExampleConfig


def test_it_keeps_what_corrections_promise() -> None:
    assert_keeps_contract(Example)


def test_a_weight_is_cut_at_the_bound() -> None:
    ratios = torch.tensor([[0.5, 1.0, 8.0]], dtype=torch.float64)
    zero = torch.zeros_like(ratios)
    found = Example(ExampleConfig(high=2.0)).correct(ratios.log(), zero, torch.ones_like(ratios))
    torch.testing.assert_close(found.weight, torch.tensor([[0.5, 1.0, 2.0]], dtype=torch.float64))
