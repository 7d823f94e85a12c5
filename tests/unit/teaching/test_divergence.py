"""`gkd` on rows of logits: worked numbers, gradients, candidates that are missing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from posttrain.core.contracts import DistillationLoss, RowLoss, TeacherRows
from posttrain.core.errors import ConfigError
from tests.helpers.plugins import MANAGER

S, T = [0.5, 0.3, 0.2], [0.2, 0.5, 0.3]
S4, T4 = [0.5, 0.25, 0.15, 0.1], [0.4, 0.1, 0.35, 0.15]


def rows(
    student: list[float], teacher: list[float], token: int = 0, **fields: Any
) -> tuple[RowLoss, Tensor]:
    """The loss of one token whose probabilities are given, and its gradient in the logits."""
    logits = torch.tensor([student], dtype=torch.float64).log().requires_grad_()
    loss = MANAGER.build(DistillationLoss, "gkd", fields)
    said = TeacherRows(
        sampled=torch.tensor([token]),
        logits=torch.tensor([teacher], dtype=torch.float64).log(),
        old_logprobs=logits.detach()[:, token],
    )
    found = loss.rows(logits, said)
    (grad,) = torch.autograd.grad(found.loss.sum(), logits)
    return found, grad[0]


@pytest.mark.parametrize(
    ("fields", "value", "grad"),
    [
        ({"divergence": "reverse"}, 0.223805, [0.346243, -0.220389, -0.125854]),
        ({"divergence": "forward"}, 0.193794, [0.3, -0.2, -0.1]),
        ({"divergence": "jsd", "beta": 0.1}, 0.017563, None),
        ({"divergence": "jsd", "beta": 0.5}, 0.050875, [0.077318, -0.050263, -0.027055]),
        ({"divergence": "jsd", "beta": 0.9}, 0.019661, None),
        ({"divergence": "jeffreys", "weight": 0.5}, 0.208799, None),
    ],
)
def test_values_and_gradients_over_the_vocabulary(
    fields: dict[str, Any], value: float, grad: list[float] | None
) -> None:
    found, slope = rows(S, T, **fields)
    assert float(found.loss.detach()) == pytest.approx(value, abs=1e-6)
    assert float(slope.sum()) == pytest.approx(0, abs=1e-12)
    if grad is not None:
        torch.testing.assert_close(slope, torch.tensor(grad).double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("divergence", "rest", "value"),
    [
        ("forward", "raw", 0.207297),
        ("forward", "renorm", 0.133295),
        ("forward", "tail", 0.123179),
        ("reverse", "raw", 0.340645),
        ("reverse", "renorm", 0.048728),
        ("reverse", "tail", 0.167358),
        ("jsd", "tail", 0.042475),
    ],
)
def test_two_candidates_of_four(divergence: str, rest: str, value: float) -> None:
    found, _ = rows(S4, T4, divergence=divergence, support="topk", top_k=2, rest=rest)
    assert float(found.loss.detach()) == pytest.approx(value, abs=1e-6)


def test_masses_and_overlap_of_the_candidates() -> None:
    found, _ = rows(S4, T4, divergence="forward", support="topk", top_k=2)
    measured = {name: round(float(value), 6) for name, value in found.metrics.items()}
    assert measured["distil/student_mass"] == 0.65  # of tokens 0 and 2
    assert measured["distil/teacher_mass"] == 0.75
    assert measured["distil/overlap"] == 0.5


@pytest.mark.parametrize("divergence", ["forward", "reverse"])
def test_the_sampled_tail_has_the_value_and_gradient_of_the_whole(divergence: str) -> None:
    whole, slope = rows(S4, T4, divergence=divergence)
    value, grad = 0.0, torch.zeros(4, dtype=torch.float64)
    for token, chance in enumerate(S4):
        fields = {"divergence": divergence, "support": "topk", "top_k": 2, "rest": "sampled_tail"}
        found, own = rows(S4, T4, token, **fields)
        value += chance * float(found.loss)
        grad += chance * own
    assert value == pytest.approx(float(whole.loss), abs=1e-12)
    torch.testing.assert_close(grad, slope)


def test_a_token_without_candidates_is_not_scored_and_a_missing_one_is_left_out() -> None:
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    ids = torch.tensor([[4, 2], [4, -1], [-1, -1]])
    values = torch.tensor([[-0.5, -1.5], [-0.5, -torch.inf], [-torch.inf, -torch.inf]])
    said = TeacherRows(torch.zeros(3, dtype=torch.int64), topk_ids=ids, topk_logprobs=values)
    loss = MANAGER.build(DistillationLoss, "gkd", {"divergence": "forward", "support": "topk"})
    found = loss.rows(logits, said)
    assert found.scored.tolist() == [True, True, False]
    (grad,) = torch.autograd.grad(found.loss[found.scored].sum(), logits)
    assert grad.isfinite().all() and not grad[2].any() and grad[:2].any(dim=1).all()
    alone = loss.rows(
        logits[1:2],
        TeacherRows(said.sampled[:1], topk_ids=ids[1:2, :1], topk_logprobs=values[1:2, :1]),
    )
    torch.testing.assert_close(found.loss[1:2], alone.loss)


def test_tau_shrinks_the_gradient_by_its_square_near_the_teacher() -> None:
    close = [0.5001, 0.3, 0.1999]
    _, plain = rows(close, S, divergence="forward")
    _, warm = rows(close, S, divergence="forward", temperature=4.0)
    _, scaled = rows(close, S, divergence="forward", temperature=4.0, scale_tau2=True)
    assert float(warm.norm()) < 0.12 * float(plain.norm())
    torch.testing.assert_close(scaled, 16 * warm)


def test_the_ratio_is_capped() -> None:
    logits = torch.tensor([S], dtype=torch.float64).log()
    said = TeacherRows(
        sampled=torch.tensor([0]),
        logits=torch.tensor([T], dtype=torch.float64).log(),
        old_logprobs=logits[:, 0] - 0.9,
    )
    plain, capped = (
        MANAGER.build(DistillationLoss, "gkd", {"ratio_cap": cap}).rows(logits, said).loss
        for cap in (None, 2.0)
    )
    torch.testing.assert_close(capped, 2.0 * plain)  # not exp(0.9) = 2.459603 times


def test_a_clamp_of_the_sampled_token_bounds_its_factor_and_keeps_its_gradient() -> None:
    """l = sg(d) log p: clamped itself, it would have no gradient where either is large."""
    fields = {"divergence": "reverse", "support": "sampled"}
    for token in range(3):
        logits = torch.tensor([S], dtype=torch.float64).log().requires_grad_()
        gap = math.log(S[token] / T[token])
        said = TeacherRows(torch.tensor([token]), logprobs=torch.tensor([math.log(T[token])]))
        loss = MANAGER.build(DistillationLoss, "gkd", {**fields, "clamp": 0.45})
        found = loss.rows(logits, said)
        (grad,) = torch.autograd.grad(found.loss.sum(), logits)
        factor = max(-0.45, min(0.45, gap))
        score = torch.eye(3, dtype=torch.float64)[token] - torch.tensor(S, dtype=torch.float64)
        torch.testing.assert_close(grad[0], factor * score, rtol=0, atol=1e-7)
        assert float(found.metrics["distil/divergence"]) == pytest.approx(factor, abs=1e-7)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"beta": 0.001}, "greater than or equal to 0.01"),
        ({"support": "topk", "top_k": 1, "rest": "renorm", "of": "teacher"}, "nothing to learn"),
        ({"support": "sampled"}, "an estimate of reverse, not of jsd"),
        (
            {"divergence": "reverse", "support": "sampled", "floor_at_zero": True},
            "of both signs.*remove floor_at_zero",
        ),
        ({"top_k": 8}, "top_k is of support: topk and changes nothing with support: full"),
        ({"of": "teacher"}, "of is of support: topk"),
        ({"rest": "raw"}, "rest is of support: topk"),
        ({"log_prob_floor": -10.0}, "log_prob_floor is of support: topk"),
        (
            {"divergence": "reverse", "support": "sampled", "top_k": 8},
            "changes nothing with support: sampled; set top_k: 32, or support: topk",
        ),
        ({"divergence": "forward", "beta": 0.3}, "beta is of divergence: jsd"),
        ({"weight": 0.3}, "weight is of divergence: jeffreys and changes nothing with"),
        ({"support": "topk", "rest": "sampled_tail"}, "known for forward and reverse"),
        (
            {"divergence": "forward", "support": "topk", "temperature": 2.0},
            "at the sampling temperature",
        ),
    ],
)
def test_settings_without_a_meaning_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        MANAGER.build(DistillationLoss, "gkd", fields)


def test_a_resolved_config_which_writes_defaults_out_is_taken() -> None:
    for fields in ({"divergence": "forward"}, {"divergence": "reverse", "support": "sampled"}):
        config = MANAGER.config("distillation_loss", "gkd", fields)
        again = MANAGER.config("distillation_loss", "gkd", config.model_dump(mode="json"))
        assert again == config
