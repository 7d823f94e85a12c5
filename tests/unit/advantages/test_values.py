"""Estimators with a critic: `gae`, `a2c`, `n_step`, `td_lambda`, `decoupled_gae`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import AdvantageEstimator
from posttrain.core.kit.batches import build_batch
from tests.helpers.advantages import MANAGER, estimate

NAN = float("nan")
OFF = {"whiten": "off"}


def one_row(rewards: list[float], values: list[float], mask: list[int]) -> RolloutBatch:
    return build_batch(
        [mask],
        token_rewards=torch.tensor([rewards]).double(),
        values=torch.tensor([values]).double(),
    )


PLAIN = ([0.0, 0.0, 1.0], [0.5, 0.6, 0.8], [1, 1, 1])


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"lam": 0.0}, [0.1, 0.2, 0.2]),
        ({"lam": 0.5}, [0.25, 0.3, 0.2]),
        ({"lam": 0.95}, [0.4705, 0.39, 0.2]),
        ({"lam": 1.0}, [0.5, 0.4, 0.2]),
        ({"gamma": 0.9}, [0.31, 0.3, 0.2]),
    ],
)
def test_gae_by_hand(fields: dict[str, object], expected: list[float]) -> None:
    got = estimate("gae", one_row(*PLAIN), **fields, **OFF)
    assert got.advantages[0].tolist() == pytest.approx(expected)
    assert got.returns is not None
    wanted = [a + v for a, v in zip(expected, PLAIN[1], strict=True)]
    assert got.returns[0].tolist() == pytest.approx(wanted)


@pytest.mark.parametrize(("lam", "expected"), [(1.0, [0.5, 0.0, 0.2]), (0.0, [0.3, 0.0, 0.2])])
@pytest.mark.parametrize("value_in_the_gap", [99.0, NAN])
def test_gae_steps_over_tool_output(
    lam: float, expected: list[float], value_in_the_gap: float
) -> None:
    batch = one_row([0.0, NAN, 1.0], [0.5, value_in_the_gap, 0.8], [1, 0, 1])
    got = estimate("gae", batch, lam=lam, **OFF)
    assert got.advantages[0].tolist() == pytest.approx(expected)
    assert got.returns is not None and got.returns[0, 1] == 0.0


def test_gae_is_whitened_over_all_tokens_by_default_and_its_returns_are_not() -> None:
    batch = random_batch(3, [[1, 1, 0, 1, 1, 0], [1, 0, 0, 0, 0, 0], [0] * 6])
    raw, got = estimate("gae", batch, lam=0.9, **OFF), estimate("gae", batch, lam=0.9)
    taken = batch.mask.bool()
    kept = raw.advantages[taken]
    torch.testing.assert_close(
        got.advantages[taken], (kept - kept.mean()) * torch.rsqrt(kept.var() + 1e-8)
    )
    assert got.advantages[~taken].abs().sum() == 0
    assert raw.returns is not None and got.returns is not None
    assert torch.equal(raw.returns, got.returns)


# --- identities -------------------------------------------------------------------------------


def random_batch(seed: int, mask: list[list[int]]) -> RolloutBatch:
    noise = torch.Generator().manual_seed(seed)
    response = torch.tensor(mask).double()

    def column() -> Tensor:
        values = torch.randn(response.shape, generator=noise, dtype=torch.float64)
        return torch.where(response.bool(), values, NAN)

    rows = torch.randn(len(mask), generator=noise, dtype=torch.float64)
    return build_batch(response, token_rewards=column(), values=column(), bootstrap_value=rows)


masks = st.lists(st.lists(st.integers(0, 1), min_size=6, max_size=6), min_size=1, max_size=4)
same = {"rtol": 0.0, "atol": 1e-9}


@given(masks, st.integers(0, 99), st.floats(0, 1))
def test_one_step_is_a2c_is_gae_with_lambda_zero(
    mask: list[list[int]], seed: int, gamma: float
) -> None:
    batch = random_batch(seed, mask)
    a2c = estimate("a2c", batch, gamma=gamma)
    for other in (
        estimate("n_step", batch, gamma=gamma, n=1),
        estimate("gae", batch, gamma=gamma, lam=0.0, **OFF),
        estimate("td_lambda", batch, gamma=gamma, lam=0.0),
    ):
        torch.testing.assert_close(other.advantages, a2c.advantages, **same)
        assert other.returns is not None and a2c.returns is not None
        torch.testing.assert_close(other.returns, a2c.returns, **same)


@given(masks, st.integers(0, 99), st.floats(0, 1), st.integers(6, 20))
def test_all_steps_are_gae_with_lambda_one_are_returns_less_values(
    mask: list[list[int]], seed: int, gamma: float, n: int
) -> None:
    batch = random_batch(seed, mask)
    returns = estimate("mc_return", batch, gamma=gamma).advantages
    values = torch.where(batch.mask.bool(), batch.column("values"), 0.0)
    for got in (
        estimate("n_step", batch, gamma=gamma, n=n),
        estimate("gae", batch, gamma=gamma, lam=1.0, **OFF),
        estimate("td_lambda", batch, gamma=gamma, lam=1.0),
    ):
        torch.testing.assert_close(got.advantages, returns - values, **same)
        assert got.returns is not None
        torch.testing.assert_close(got.returns, returns, **same)


@given(masks, st.integers(0, 99), st.floats(0, 1), st.integers(1, 7), st.booleans())
def test_n_step_is_n_rewards_and_a_value(
    mask: list[list[int]], seed: int, gamma: float, n: int, truncated: bool
) -> None:
    """Against the sum as it is written, one sampled token after the other."""
    batch = random_batch(seed, mask)
    batch.truncated.fill_(truncated)
    got = estimate("n_step", batch, gamma=gamma, n=n, bootstrap_truncated=True).advantages
    for row in range(len(mask)):
        steps = [t for t in range(6) if mask[row][t]]
        rewards = [float(batch.column("token_rewards")[row, t]) for t in steps]
        values = [float(batch.column("values")[row, t]) for t in steps]
        after = float(batch.column("bootstrap_value")[row]) if truncated else 0.0
        for i, t in enumerate(steps):
            window = rewards[i : i + n]
            at_end = i + n >= len(steps)
            last = after if at_end else values[i + n]
            total = sum(gamma**k * r for k, r in enumerate(window)) + gamma ** len(window) * last
            assert float(got[row, t]) == pytest.approx(total - values[i], abs=1e-9)


def test_td_lambda_targets_follow_their_own_recursion() -> None:
    gamma, lam = 0.9, 0.7
    batch = one_row([0.2, -0.1, 0.5, 1.0], [0.5, 0.6, 0.8, -0.3], [1, 1, 1, 1])
    rewards, values = batch.column("token_rewards")[0], batch.column("values")[0]
    target, next_value, wanted = 0.0, 0.0, []
    for t in reversed(range(4)):
        blend = (1 - lam) * next_value + lam * target
        target, next_value = float(rewards[t]) + gamma * blend, float(values[t])
        wanted.insert(0, target)
    got = estimate("td_lambda", batch, gamma=gamma, lam=lam)
    assert got.returns is not None and got.returns[0].tolist() == pytest.approx(wanted)
    torch.testing.assert_close(got.advantages[0], got.returns[0] - values)


# --- bootstrap --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gae", "a2c", "n_step", "td_lambda", "decoupled_gae"])
def test_only_truncated_responses_go_on_after_their_last_token(name: str) -> None:
    batch = random_batch(0, [[1, 1, 1, 0, 1, 0], [1, 1, 0, 0, 0, 0]])
    batch.truncated[0] = True
    after = torch.tensor([0.7, NAN], dtype=torch.float64)
    estimator = MANAGER.build(AdvantageEstimator, name, {"bootstrap_truncated": True, **OFF})
    assert estimator.required_columns() >= {"values", "bootstrap_value"}
    got = estimator.estimate(batch.with_columns(bootstrap_value=after))
    plain = estimate(name, batch, **OFF)
    assert got.returns is not None and plain.returns is not None
    assert float(got.returns[0, 4] - plain.returns[0, 4]) == pytest.approx(0.7)
    assert torch.equal(got.returns[1], plain.returns[1])
    assert torch.equal(got.advantages[1], plain.advantages[1])


# --- decoupled_gae ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "lam"), [(10, 0.0), (20, 0.0), (100, 0.8), (1000, 0.98), (20000, 0.999)]
)
def test_lambda_grows_with_the_response(length: int, lam: float) -> None:
    estimator = MANAGER.build(AdvantageEstimator, "decoupled_gae")
    got = estimator.lambdas(torch.tensor([0.0, length], dtype=torch.float64))  # type: ignore[attr-defined]
    assert got.tolist() == pytest.approx([0.0, lam])


def test_decoupled_gae_has_one_lambda_per_row_and_another_for_the_critic() -> None:
    mask = torch.ones(2, 100)
    mask[1, 30:] = 0
    batch = random_batch(1, mask.int().tolist())
    got = estimate("decoupled_gae", batch, **OFF)
    for row, lam in ((0, 0.8), (1, 1 / 3)):
        by_hand = estimate("gae", batch, lam=lam, **OFF).advantages[row]
        torch.testing.assert_close(got.advantages[row], by_hand)
    targets = estimate("gae", batch, lam=1.0).returns
    assert got.returns is not None and targets is not None
    torch.testing.assert_close(got.returns, targets)


def test_decoupled_gae_with_one_lambda_for_both_is_gae() -> None:
    batch = random_batch(2, [[1, 0, 1, 1, 1, 0]])
    both = estimate("decoupled_gae", batch, lam_policy=0.95, lam_critic=0.95)
    single = estimate("gae", batch, lam=0.95)
    assert torch.equal(both.advantages, single.advantages)
    assert both.returns is not None and single.returns is not None
    assert torch.equal(both.returns, single.returns)
