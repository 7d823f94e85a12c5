import torch

from posttrain.core.contracts import AggregatorConfig, TokenLoss
from posttrain.core.kit.checks import assert_keeps_contract
from posttrain.core.kit.examples.aggregator import Example


def test_it_keeps_what_aggregators_promise() -> None:
    assert_keeps_contract(Example)


def test_a_mean_by_hand() -> None:
    aggregator = Example(AggregatorConfig())
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    loss = TokenLoss(torch.tensor([[1.0, 2.0], [6.0, 9.0]]), mask)
    assert float(aggregator.aggregate(loss, mask, aggregator.count(mask))) == 3.0
