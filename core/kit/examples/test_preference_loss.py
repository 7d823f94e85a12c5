import torch

from posttrain.core.contracts import BetaConfig, PairScores
from posttrain.core.kit.checks import assert_keeps_contract
from posttrain.core.kit.examples.preference_loss import Example


def test_it_keeps_what_preference_losses_promise() -> None:
    assert_keeps_contract(Example)


def test_values_by_hand() -> None:
    pairs = PairScores.of_rewards(torch.tensor([0.0, 4.0]), torch.tensor([0.0, 0.0]))
    assert Example(BetaConfig(beta=0.5)).pair_loss(pairs).tolist() == [1.0, 0.0]
