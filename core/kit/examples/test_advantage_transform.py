import torch

from posttrain.core.kit.batches import build_batch
from posttrain.core.kit.checks import assert_keeps_contract
from posttrain.core.kit.examples.advantage_transform import Example, ExampleConfig


def test_it_keeps_what_transforms_promise() -> None:
    assert_keeps_contract(Example)


def test_a_token_by_hand() -> None:
    batch = build_batch([[1.0, 1.0]], teacher_logprobs=torch.tensor([[-5.0, 0.5]]))
    found = Example(ExampleConfig()).transform(torch.tensor([[1.0, 1.0]]), batch)
    assert found.advantages.tolist() == [[-1.0, 1.5]]
