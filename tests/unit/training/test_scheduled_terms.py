"""Coefficients that change from step to step, and the rest of one on the other losses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from posttrain.core.config.coefficients import CoefSchedule
from posttrain.core.config.rl_stage import LossTermComponent
from posttrain.core.contracts import Aggregator, PolicyLoss
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.training.objective import LossTerm, Objective
from tests.helpers.losses import MANAGER, build_aggregator, build_loss, policy_batch, total_and_grad
from tests.helpers.rollouts import load_tiny, ragged_batch
from tests.helpers.updates import update
from tests.unit.test_learner_terms import make_learner, ptx_term

MU = CoefSchedule(warmup=10, peak=0.5, decay=100, valley=0.02, complement=True)
CUT = [[[0], [1], [2]], [[3, 4, 5, 6, 7]]]


def test_the_schedule_rises_in_a_line_and_falls_along_a_cosine() -> None:
    assert [MU.at(step) for step in (5, 10, 60, 110, 500)] == pytest.approx(
        [0.25, 0.5, 0.26, 0.02, 0.02], abs=1e-15
    )
    assert MU.at(35) == pytest.approx(0.02 + 0.48 * (1 + math.cos(math.pi / 4)) / 2, abs=1e-15)
    assert [CoefSchedule(peak=0.1).at(step) for step in (1, 10**6)] == [0.1, 0.1]
    assert [CoefSchedule(peak=0.9, decay=2, valley=0.1).at(s) for s in (1, 2, 3)] == pytest.approx(
        [0.5, 0.1, 0.1]
    )


@pytest.mark.parametrize(
    ("coef", "word"),
    [
        ({"warmup": 3}, "peak"),
        ({"peak": 1.0, "decay": 5}, "give both"),
        ({"peak": 1.0, "valley": 0.1}, "give both"),
        ({"peak": 1.5, "complement": True}, "below 0"),
        ({"peak": True}, "not true or false"),
        (True, "not true or false"),
        (-0.1, "greater than or equal to 0"),
        ("much", "valid number"),
    ],
)
def test_a_coefficient_that_means_nothing_is_refused(coef: Any, word: str) -> None:
    with pytest.raises(ValidationError, match=word):
        LossTermComponent.model_validate({"name": "ptx", "coef": coef})


def scheduled(step: int) -> tuple[Objective, tuple[Tensor, Tensor]]:
    """(1 - mu) of one loss and mu of another with a mask of its own, in two numbers."""
    own, other = build_aggregator("seq-mean-token-mean"), build_aggregator("token-mean")
    terms = (
        LossTerm(build_loss("ppo_clip"), own, 2.0, rest_of=MU),
        LossTerm(build_loss("positive_lm"), other, MU),
    )
    objective = Objective(terms, own)
    batch, new = policy_batch(seed=3)
    parts = [
        total_and_grad(Objective((LossTerm(term.loss, term.aggregator),), own), batch, new)
        for term in terms
    ]
    mu = MU.at(step)
    value, grad = (2 * (1 - mu) * a + mu * b for a, b in zip(*parts, strict=True))
    return objective, (value, grad)


@pytest.mark.parametrize("step", [5, 60, 200])
@pytest.mark.parametrize("cut", [None, CUT])
def test_both_terms_count_by_the_schedule_however_the_work_is_cut(step: int, cut: Any) -> None:
    objective, wanted = scheduled(step)
    batch, new = policy_batch(seed=3)
    got = total_and_grad(objective, batch, new, cut, step=step)
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)
    assert got[1].abs().max() > 0


def test_the_record_says_what_the_coefficients_were() -> None:
    objective, _ = scheduled(60)
    found = objective.prepare(policy_batch(seed=3)[0], torch.Generator(), step=60).metrics
    assert found["loss/coef/positive_lm"] == pytest.approx(0.26)
    assert found["loss/coef/ppo_clip"] == pytest.approx(2 * 0.74)


def test_the_pre_training_term_follows_the_schedule(tmp_path: Path) -> None:
    """At the end of the warm-up its gradient is ten times that of the first step's, and the
    policy's share is the rest; a learner that begins there finds the same numbers."""
    model_dir = make_tiny_model(tmp_path / "model")
    batch, examples = ragged_batch([5, 4], group_size=3), ragged_batch([3, 7, 5], group_size=1)
    mean = MANAGER.build(Aggregator, "token-mean")

    def metrics(step: int) -> dict[str, float]:
        learner = make_learner(load_tiny(model_dir), MANAGER)
        clip = LossTerm(MANAGER.build(PolicyLoss, "ppo_clip"), mean, 1.0, rest_of=MU)
        learner.objective = Objective((clip,), mean)
        ptx = ptx_term(MANAGER, 1.0, examples, 4)
        object.__setattr__(ptx.term, "coef", MU)
        object.__setattr__(ptx, "batch_size", 3)  # the same examples in every step
        learner.ptx = ptx
        return dict(update(learner, batch, step, 0.0).metrics)

    first, last = metrics(1), metrics(10)
    assert (first["loss/coef/ptx"], last["loss/coef/ptx"]) == pytest.approx((0.05, 0.5))
    assert last["loss/term/ptx"] == pytest.approx(10 * first["loss/term/ptx"], rel=1e-9)
    assert last["loss/coef/ppo_clip"] == pytest.approx(0.5)
    assert last["loss/policy"] == pytest.approx(0.5 / 0.95 * first["loss/policy"], rel=1e-9)
