import pytest
import torch

from posttrain.core.contracts import NoConfig, TeacherRows
from posttrain.core.kit.checks import assert_keeps_contract
from posttrain.core.kit.examples.distillation_loss import Example


def test_it_keeps_what_divergences_promise() -> None:
    assert_keeps_contract(Example)


def test_two_tokens_by_hand() -> None:
    teacher = TeacherRows(torch.tensor([0]), logits=torch.tensor([[0.5, 0.5]]).log())
    found = Example(NoConfig()).rows(torch.tensor([[0.25, 0.75]]).log(), teacher)
    assert float(found.loss) == pytest.approx(0.25 * (0.6931**2 + 0.4055**2), rel=1e-3)
