"""`opd`, `iw_opd`, `zero` and `ref_kl`: worked numbers, gradients, tokens that nobody scored."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import AdvantageEstimator, AdvantageTransform, PolicyLoss
from posttrain.core.kit.batches import build_batch
from tests.helpers.plugins import MANAGER

NAN = float("nan")


def batch_of(gaps: Sequence[float], advantages: float = 0.0) -> RolloutBatch:
    """One response whose tokens the teacher finds so much likelier than the policy did."""
    policy = torch.full((1, len(gaps)), -1.0, dtype=torch.float64)
    return build_batch(
        torch.ones(1, len(gaps)),
        advantages=torch.full_like(policy, advantages),
        old_logprobs=policy,
        rollout_logprobs=policy,
        teacher_logprobs=policy + torch.tensor([list(gaps)], dtype=torch.float64),
    )


def moved(name: str, batch: RolloutBatch, **fields: object) -> list[float]:
    transform = MANAGER.build(AdvantageTransform, name, fields)
    found: list[float] = (
        transform.transform(batch.column("advantages"), batch).advantages[0].tolist()
    )
    return found


def test_opd_by_hand() -> None:
    assert moved("opd", batch_of([0.5], 1.0), coef=0.5) == pytest.approx([1.25])
    assert moved("opd", batch_of([0.5, -0.2, 0.1]), gamma=0.5) == pytest.approx([0.425, -0.15, 0.1])
    assert moved("opd", batch_of([30.0, -30.0]), clamp=5.0) == pytest.approx([5.0, -5.0])
    assert moved("opd", batch_of([0.0, 0.0])) == [0.0, 0.0]


def test_iw_opd_by_hand() -> None:
    found = moved("iw_opd", batch_of([0.4, -0.2, 0.1, 0.3]), gamma=0.5)
    assert found == pytest.approx([0.6, -0.26, 0.12, 0.345])
    assert moved("iw_opd", batch_of([0.4, -0.2]), gamma=0.0) == pytest.approx([0.4, -0.2])


@pytest.mark.parametrize("name", ["opd", "iw_opd"])
def test_a_token_that_nobody_scored_keeps_its_advantage(name: str) -> None:
    batch = batch_of([0.4, NAN, 0.1], 2.0)
    found = moved(name, batch)
    assert found[1] == 2.0 and found[0] > 2.0 and found[2] > 2.0


def test_the_gradient_of_opd_is_that_of_the_reverse_kl() -> None:
    """E[-a * score] under the policy, over all tokens that it may sample."""
    student = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    teacher = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    logits = student.log().requires_grad_()
    logprobs = torch.log_softmax(logits, dim=0)
    kl = (logprobs.exp() * (logprobs - teacher.log())).sum()
    (wanted,) = torch.autograd.grad(kl, logits, retain_graph=True)
    batch = build_batch(
        torch.ones(3, 1),
        advantages=torch.zeros(3, 1, dtype=torch.float64),
        old_logprobs=student.log()[:, None],
        teacher_logprobs=teacher.log()[:, None],
    )
    transform = MANAGER.build(AdvantageTransform, "opd")
    ready = transform.transform(batch.column("advantages"), batch).advantages
    loss = MANAGER.build(PolicyLoss, "ppo_clip")
    result = loss.token_loss(logprobs[:, None], batch.with_columns(advantages=ready))
    (got,) = torch.autograd.grad((student[:, None] * result.loss).sum(), logits, retain_graph=True)
    torch.testing.assert_close(got, wanted)
    # `ref_kl` at the first update as well, whose ratio is against the engine here.
    engine = batch.with_columns(rollout_logprobs=batch.column("old_logprobs"))
    result = MANAGER.build(PolicyLoss, "ref_kl").token_loss(logprobs[:, None], engine)
    (got,) = torch.autograd.grad((student[:, None] * result.loss).sum(), logits)
    torch.testing.assert_close(got, wanted)


def test_ref_kl_by_hand() -> None:
    """The second token lost more than 0.2 of its probability: only the drift is left."""
    column = {"dtype": torch.float64}
    batch = build_batch(
        torch.ones(1, 3),
        rollout_logprobs=torch.tensor([[-1.0, -0.3, -1.0]], **column),
        teacher_logprobs=torch.tensor([[-0.7, -0.4, NAN]], **column),
    )
    now = torch.tensor([[-1.2, -0.9, -1.2]], **column)
    result = MANAGER.build(PolicyLoss, "ref_kl").token_loss(now, batch)
    assert result.loss[0, :2].tolist() == pytest.approx([-0.409325, 0.00036], abs=1e-6)
    assert result.mask.tolist() == [[1.0, 1.0, 0.0]]
    assert result.ratio is not None
    assert float(result.ratio[0, 0]) == pytest.approx(0.818731, abs=1e-6)


def test_ref_kl_with_a_clip_is_ppo_clip_of_the_gap() -> None:
    batch = batch_of([0.5, -0.5])
    now = torch.tensor([[-0.5, -1.5]], dtype=torch.float64)  # ratios 1.65 and 0.61
    fields = {"clip": [0.2, 0.28], "mask_low": None, "drift": 0.0}
    got = MANAGER.build(PolicyLoss, "ref_kl", fields).token_loss(now, batch).loss
    gap = batch.column("teacher_logprobs") - now
    ppo = MANAGER.build(PolicyLoss, "ppo_clip", {"clip_low": 0.2, "clip_high": 0.28})
    wanted = ppo.token_loss(now, batch.with_columns(advantages=gap)).loss
    torch.testing.assert_close(got, wanted)


def test_zero_is_zero_whatever_the_rewards_are() -> None:
    batch = build_batch(
        torch.ones(2, 3),
        token_rewards=torch.tensor([[0.0, 0.0, 5.0], [0.0, 0.0, -5.0]]),
        rewards=torch.tensor([5.0, -5.0]),
    )
    assert not MANAGER.build(AdvantageEstimator, "zero").estimate(batch).advantages.any()
