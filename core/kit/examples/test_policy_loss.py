import torch

from posttrain.core.kit.batches import build_batch
from posttrain.core.kit.checks import assert_keeps_contract
from posttrain.core.kit.examples.policy_loss import Example, ExampleConfig


def test_it_keeps_what_policy_losses_promise() -> None:
    assert_keeps_contract(Example)


def test_a_ratio_beyond_the_bound_is_clipped() -> None:
    one = torch.ones(1, 2, dtype=torch.float64)
    batch = build_batch(one, advantages=one, old_logprobs=0 * one)
    ratios = torch.tensor([[1.1, 2.0]], dtype=torch.float64)
    loss = Example(ExampleConfig(clip=0.2)).token_loss(ratios.log(), batch).loss
    torch.testing.assert_close(loss, torch.tensor([[-1.1, -1.2]], dtype=torch.float64))
