"""Gradients are clipped to a norm over all weights, and left as they are below it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from posttrain.core.config.sections import OptimizerSection
from posttrain.core.training.optim import MasterOptimizer, StepReport

NORM = 5.0  # of gradients (3, 0) and (0, 4)


def stepped(limit: float | None, first: float = 3.0) -> tuple[StepReport, list[Tensor]]:
    """The report of a step, and the gradients that AdamW was given."""
    module = nn.ParameterList([torch.zeros(2), torch.zeros(2)])
    section = OptimizerSection(learning_rate=0.1, max_grad_norm=limit)
    optimizer = MasterOptimizer(module, section, 1)
    seen: list[Tensor] = []

    def look(adamw: torch.optim.Optimizer, *rest: Any) -> None:  # Any: torch's hook
        seen.extend(p.grad.clone() for p in adamw.param_groups[0]["params"])

    optimizer.optimizer.register_step_pre_hook(look)
    gradients = torch.tensor([[first, 0.0], [0.0, 4.0]])
    for parameter, gradient in zip(module, gradients, strict=True):
        parameter.grad = gradient.clone()
    return optimizer.step(), seen


def test_a_larger_norm_is_scaled_down_to_the_limit() -> None:
    report, seen = stepped(1.0)
    torch.testing.assert_close(torch.stack(seen), torch.tensor([[0.6, 0.0], [0.0, 0.8]]))
    assert report.grad_norm == pytest.approx(NORM) and report.grad_clipped


@pytest.mark.parametrize("limit", [None, 5.0, 6.0])
def test_a_norm_within_the_limit_changes_no_bit(limit: float | None) -> None:
    report, seen = stepped(limit)
    assert torch.equal(torch.stack(seen), torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
    assert report.grad_norm == pytest.approx(NORM) and not report.grad_clipped


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_with_a_norm_that_is_not_finite_no_step_is_taken(wrong: float) -> None:
    report, seen = stepped(1.0, wrong)  # in one gradient of the two
    assert not seen and report.non_finite and not math.isfinite(report.grad_norm)
