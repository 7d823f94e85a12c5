"""KL controllers `"fixed"`, `"adaptive"` and `"ppo_halving"`."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from posttrain.core.contracts import KlController
from posttrain.core.errors import ConfigError, RunError
from posttrain.core.plugin_manager import PluginManager

MANAGER = PluginManager()


def build(name: str, **fields: object) -> KlController[Any]:
    return MANAGER.build(KlController, name, fields)


def described(controller: KlController[Any], kl: float, rows: int = 1) -> float:
    """The coefficient after one update with `kl` nats in every unit."""
    controller.update(kl_per_token=kl, kl_per_sequence=kl, num_rows=rows)
    return controller.coefficient()


def settle(controller: KlController[Any], *, gain: float, steps: int, rows: int) -> float:
    """The KL that a policy ends at whose KL tends to `gain` / coef, a quarter of the way a step."""
    kl = 0.0
    for _ in range(steps):
        kl += 0.25 * (gain / controller.coefficient() - kl)
        described(controller, kl, rows)
    return kl


def test_fixed_keeps_its_coefficient_whatever_it_is_told() -> None:
    controller = build("fixed", coef=0.03)
    assert described(controller, 50.0) == 0.03
    controller.load_state(controller.state())
    assert controller.coefficient() == 0.03 and build("fixed").coefficient() == 0.04
    with pytest.raises(ConfigError, match="coef"):
        build("fixed", coef=-1)


def test_adaptive_takes_zieglers_step() -> None:
    # beta 0.2, KL 9 against 6 (error 0.5, clipped to 0.2), 256 responses, horizon 10000.
    controller = build("adaptive")
    assert controller.coefficient() == 0.2
    assert described(controller, 9.0, rows=256) == pytest.approx(0.201024, abs=1e-9)


@pytest.mark.parametrize(("kl", "error"), [(6.0, 0.0), (6.6, 0.1), (60.0, 0.2), (0.0, -0.2)])
def test_adaptive_moves_by_the_clipped_error(kl: float, error: float) -> None:
    assert described(build("adaptive"), kl, 1000) == pytest.approx(0.2 * (1 + 0.1 * error))


def test_controllers_tell_what_they_steer_to() -> None:
    assert build("fixed").target() is None
    assert build("adaptive").target() == ("sequence", 6.0)
    assert build("adaptive", kl_unit="token", target=0.1).target() == ("token", 0.1)
    assert build("ppo_halving", target=0.02).target() == ("token", 0.02)


def test_adaptive_reads_the_unit_of_its_target() -> None:
    per_token = build("adaptive", kl_unit="token", target=0.1, horizon=1000)
    per_token.update(kl_per_token=0.05, kl_per_sequence=99.0, num_rows=100)
    assert per_token.coefficient() == pytest.approx(0.2 * (1 - 0.2 * 0.1))
    per_sequence = build("adaptive", target=6.0, horizon=1000)
    per_sequence.update(kl_per_token=0.05, kl_per_sequence=99.0, num_rows=100)
    assert per_sequence.coefficient() == pytest.approx(0.2 * (1 + 0.2 * 0.1))
    with pytest.raises(ConfigError, match="needs a target of its own"):
        build("adaptive", kl_unit="token")


@pytest.mark.parametrize("start", [0.01, 0.2, 3.0])
def test_adaptive_holds_its_target_on_a_simulated_policy(start: float) -> None:
    controller = build("adaptive", coef=start, target=6.0, horizon=2000)
    kl = settle(controller, gain=1.8, steps=800, rows=200)
    assert kl == pytest.approx(6.0, rel=0.02)
    assert controller.coefficient() == pytest.approx(1.8 / 6.0, rel=0.02)


def test_adaptive_refuses_a_horizon_that_could_turn_the_coefficient_negative() -> None:
    with pytest.raises(RunError, match="horizon"):
        described(build("adaptive", horizon=100), 0.0, rows=500)


@pytest.mark.parametrize(
    ("kl", "coef"),
    [(0.0066, 0.5), (0.0067, 1.0), (0.01, 1.0), (0.0149, 1.0), (0.0151, 2.0), (5.0, 2.0)],
)
def test_ppo_halving_moves_only_outside_its_band(kl: float, coef: float) -> None:
    assert described(build("ppo_halving"), kl) == coef


@pytest.mark.parametrize("start", [1e-3, 1.0, 1e4])
def test_ppo_halving_comes_to_rest_inside_its_band(start: float) -> None:
    controller = build("ppo_halving", coef=start)
    kl = settle(controller, gain=0.02, steps=400, rows=1)
    assert 0.01 / 1.5 <= kl <= 0.01 * 1.5
    assert 1.0 <= controller.coefficient() <= 4.0


def test_ppo_halving_stays_within_its_limits_and_so_comes_back_at_once() -> None:
    limited = build("ppo_halving", min_coef=0.25, max_coef=4.0)
    assert [described(limited, 0.0) for _ in range(4)] == [0.5, 0.25, 0.25, 0.25]
    assert [described(limited, 1.0) for _ in range(6)] == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0]


@pytest.mark.parametrize("name", ["adaptive", "ppo_halving"])
def test_a_controller_carries_its_coefficient_over_a_checkpoint(name: str) -> None:
    first, second = build(name), build(name)
    described(first, 100.0)
    second.load_state(json.loads(json.dumps(first.state())))
    assert second.coefficient() == first.coefficient() != build(name).coefficient()


@pytest.mark.parametrize("name", ["adaptive", "ppo_halving"])
@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_a_kl_that_was_not_measured_changes_nothing(name: str, kl: float) -> None:
    controller = build(name)
    assert described(controller, kl) == build(name).coefficient()
