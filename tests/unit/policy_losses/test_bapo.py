"""BAPO's bounds: worked examples, and the search against the loop as the paper prints it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.contracts import Prepared
from posttrain.core.kit.batches import build_batch
from posttrain.core.math.bounds import contributions
from tests.helpers.losses import build_loss, objective_of, policy_batch, token_loss, total_and_grad

Tokens = list[tuple[float, float]]

EXAMPLE: Tokens = [(1.0, 1), (1.48, 1), (1.0, -1), (0.7, -1), (1.0, -1), (0.62, -1)]


def prepare(tokens: Tokens, **fields: object) -> Prepared:
    """What the loss finds for one row of (ratio, advantage)."""
    loss = build_loss("bapo", fields)
    ratios = torch.tensor([[r for r, _ in tokens]], dtype=torch.float64)
    batch = build_batch(
        torch.ones(ratios.shape),
        old_logprobs=torch.zeros_like(ratios),
        rollout_logprobs=torch.linspace(-2, -0.1, ratios.shape[1]).double()[None, :],
        logprobs_now=ratios.log(),
        advantages=torch.tensor([[a for _, a in tokens]], dtype=torch.float64),
    )
    return loss.prepare(batch, torch.Generator())


def bounds(found: Prepared) -> tuple[float, float]:
    return found.scalars["bapo/c_low"], found.scalars["bapo/c_high"]


def test_six_moves_of_the_upper_bound_reach_the_share() -> None:
    start = prepare(EXAMPLE, rho0=1e-6)
    assert start.metrics["bapo/rho"] == pytest.approx(0.231481, abs=1e-6)
    found = prepare(EXAMPLE)
    assert bounds(found) == pytest.approx((0.6, 1.5))
    assert found.metrics["bapo/rho"] == pytest.approx(0.427586, abs=1e-6)
    assert found.metrics["bapo/iters"] == 6


def test_shares_of_values_stop_elsewhere() -> None:
    start = prepare(EXAMPLE, contribution="value_abs", rho0=1e-6)
    assert start.metrics["bapo/rho"] == pytest.approx(0.398551, abs=1e-6)
    found = prepare(EXAMPLE, contribution="value_abs")
    assert bounds(found) == pytest.approx((0.6, 1.25))
    assert found.metrics["bapo/rho"] == pytest.approx(0.403950, abs=1e-6)
    literal = prepare(EXAMPLE, contribution="eq8_literal")
    assert literal.metrics["bapo/rho"] == pytest.approx(1.964286, abs=1e-6)
    assert bounds(literal) == (0.6, 1.2)


def test_a_share_out_of_reach_ends_at_the_widest_bounds() -> None:
    tokens: Tokens = [(1.0, 1), (1.0, -1), (1.0, -1), (0.65, -1), (0.65, -1)]
    found = prepare(tokens)
    assert bounds(found) == pytest.approx((0.9, 3.0)) and found.metrics["bapo/iters"] == 51
    partly = prepare(tokens, low_stop=0.66)
    assert partly.metrics["bapo/rho"] == pytest.approx(0.333333, abs=1e-6)


def test_the_upper_range_is_used_up_first_and_the_released_code_begins_below() -> None:
    tokens: Tokens = [(1.0, 1), (0.5, -1), (0.65, -1), (1.0, -1), (2.88, 1)]
    ours = prepare(tokens, rho0=0.7)
    assert bounds(ours)[0] == 0.6 and bounds(ours)[1] == pytest.approx(2.9)
    released = prepare(tokens, contribution="released", rho0=1.5)
    assert bounds(released)[0] == pytest.approx(0.9) and bounds(released)[1] > 1.2


@pytest.mark.parametrize("sign", [1, -1])
def test_with_one_kind_of_token_only_the_bounds_stay(sign: int) -> None:
    tokens: Tokens = [(1.5, sign), (0.5, sign)]
    assert bounds(prepare(tokens)) == (0.6, 1.2)


def test_without_a_positive_token_the_search_can_be_made_to_run() -> None:
    found = prepare([(1.5, -1), (0.5, -1)], skip_if_one_sided=False)
    assert found.metrics["bapo/rho"] == 0 and bounds(found) == pytest.approx((0.9, 3.0))


def test_the_first_update_moves_nothing() -> None:
    found = prepare([(1.0, 1), (1.0, -1), (1.0, -1), (1.0, -1)])
    assert bounds(found) == (0.6, 1.2) and found.metrics["bapo/iters"] == 0


def slow_search(tokens: Tokens, contribution: str, rho0: float) -> tuple[float, float, int]:
    """The same by summing over all tokens at every move."""

    def rho(low: float, high: float) -> float:
        if contribution == "gradient":
            good = sum(r * a for r, a in tokens if a > 0 and r < high)
            bad = sum(-r * a for r, a in tokens if a < 0 and r > low)
        else:
            good = sum(min(r * a, min(r, high) * a) for r, a in tokens if a > 0)
            bad = sum(-min(r * a, min(max(r, low), high) * a) for r, a in tokens if a < 0)
        return good / (good + bad) if good + bad > 0 else 1.0

    ups = downs = 0
    while rho(0.6 + 0.02 * downs, 1.2 + 0.05 * ups) < rho0 and downs < 15:
        if ups < 36:
            ups += 1
        else:
            downs += 1
    return 0.6 + 0.02 * downs, 1.2 + 0.05 * ups, ups + downs


tokens_of = st.lists(
    st.tuples(st.floats(0.31, 3.29), st.sampled_from([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0])),
    min_size=2,
    max_size=12,
)


@pytest.mark.parametrize("contribution", ["gradient", "value_abs"])
@given(tokens=tokens_of, rho0=st.sampled_from([0.2, 0.4, 0.6, 0.9]))
def test_prefix_sums_find_what_the_loop_finds(
    contribution: str, tokens: Tokens, rho0: float
) -> None:
    good = [r for r, a in tokens if a > 0]
    movable = any(r >= 1.2 for r in good) or any(r <= 0.9 for r, a in tokens if a < 0)
    if not good or not movable:
        return
    low, high, moves = slow_search(tokens, contribution, rho0)
    found = prepare(tokens, contribution=contribution, rho0=rho0)
    assert bounds(found) == pytest.approx((low, high)) and found.metrics["bapo/iters"] == moves


def test_a_token_at_a_bound_is_outside_it() -> None:
    ratio = torch.tensor([1.2, 0.6, 1.0, 0.7], dtype=torch.float64)
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    bounds = torch.tensor([[0.6, 1.2], [0.65, 1.1]], dtype=torch.float64)
    positive, negative = contributions(ratio, advantage, bounds[:1], "gradient")
    assert positive.tolist() == [1.0] and negative.tolist() == pytest.approx([0.7])
    values = contributions(ratio, advantage, bounds[1:], "value_abs")
    assert [v.item() for v in values] == pytest.approx([2.1, 1.35])


def test_weights_are_the_engine_s_probabilities() -> None:
    weighted = prepare(EXAMPLE, weight="prob", rho0=1e-6)
    probs = torch.linspace(-2, -0.1, 6).double().exp()
    positive = float(probs[0])
    negative = float((probs[2:] * torch.tensor([1.0, 0.7, 1.0, 0.62]).double()).sum())
    share = positive / (positive + negative)
    assert weighted.metrics["bapo/rho"] == pytest.approx(share)


@pytest.mark.parametrize(
    ("ratio", "advantage", "dead"),
    [(1.21, 1.0, True), (1.19, 1.0, False), (0.59, -1.0, True), (0.61, -1.0, False)],
)
def test_the_bounds_are_ratios(ratio: float, advantage: float, dead: bool) -> None:
    _, grad = token_loss("bapo", [[ratio, 1.0]], [[advantage, 0.0]], rho0=1e-6)
    assert grad[0, 0].item() == (0.0 if dead else pytest.approx(-ratio * advantage))


def test_raising_the_lower_bound_raises_the_value_that_a_bad_token_adds() -> None:
    """Why contributions are counted in gradients: in values the second move makes rho smaller."""
    low, _ = token_loss("bapo", [[0.5, 1.0]], [[-1.0, 0.0]], rho0=1e-6)
    fields: dict[str, Any] = {"low_start": 0.9, "low_stop": 0.9, "rho0": 1e-6}
    high, _ = token_loss("bapo", [[0.5, 1.0]], [[-1.0, 0.0]], **fields)
    assert low.loss[0, 0].item() == pytest.approx(0.6)
    assert high.loss[0, 0].item() == pytest.approx(0.9)


def test_the_bounds_are_of_the_whole_mini_batch() -> None:
    batch, new = policy_batch(seed=8, spread=0.6)
    objective = objective_of(build_loss("bapo"))
    whole = objective.prepare(batch, torch.Generator()).metrics
    rows = torch.tensor([0, 1, 5])
    part = objective.prepare(batch.select(rows), torch.Generator()).metrics
    assert whole != part
    assert total_and_grad(objective, batch, new)[0].isfinite()
