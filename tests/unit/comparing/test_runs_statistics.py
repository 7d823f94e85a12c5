"""Curves over seeds, differences of configs, and tests that never say more than they show."""

from __future__ import annotations

import math

import numpy as np
import pytest

from posttrain.core.analysis.statistics import (
    MeasuredRun,
    Outcome,
    group_tests,
    mean_curve,
    seeds_difference,
)
from posttrain.pipelines.analysis.run_results import (
    SAME_EXPERIMENT,
    differences,
    experiment,
    flatten,
)


def test_a_curve_is_the_mean_over_the_runs_that_have_the_step() -> None:
    first, second = mean_curve([{1: 1.0, 2: 4.0}, {1: 3.0}])
    # two values 1 and 3: s = sqrt(2), t(1) = 12.706
    assert (first.step, first.mean, first.num_runs) == (1, 2.0, 2)
    assert first.low == pytest.approx(2 - 12.7062 * math.sqrt(2) / math.sqrt(2), abs=1e-3)
    assert (second.mean, second.low, second.high, second.num_runs) == (4.0, None, None, 1)


def test_equal_values_have_no_interval_rather_than_one_of_no_width() -> None:
    (point,) = mean_curve([{1: 0.5}, {1: 0.5}])
    assert (point.mean, point.low, point.high) == (0.5, None, None)


def test_configs_differ_by_dotted_key() -> None:
    one = flatten({"seed": 0, "stages": {"rl": {"rewards": [{"name": "a"}], "x": [1, 2]}}})
    two = flatten({"seed": 1, "stages": {"rl": {"rewards": [{"name": "b"}], "x": [1, 2]}}})
    assert differences([one, two]) == {
        "seed": ["0", "1"],
        "stages.rl.rewards.0.name": ['"a"', '"b"'],
    }
    assert differences([one, {}])["seed"] == ["0", None]


def test_runs_that_differ_in_seed_name_and_keeping_are_one_experiment() -> None:
    base = {"seed": 0, "name": "a", "keep": {"every": 0}, "stages": {"rl": {"lr": 1}}}
    again = {**base, "seed": 7, "name": "b", "keep": {"every": 5}}
    other = {**base, "stages": {"rl": {"lr": 2}}}
    assert experiment(flatten(base)) == experiment(flatten(again))
    assert experiment(flatten(base)) != experiment(flatten(other))
    text = "seed, name, run_name, description, keep, limits, forked_from, variants"
    assert ", ".join(SAME_EXPERIMENT) == text, "a report names them in this order, each time"


def run(name: str, seed: int, right: list[int], key: str = "p") -> MeasuredRun:
    rows = [Outcome(f"{key}{i}", "", "", "", bool(ok), None) for i, ok in enumerate(right)]
    return MeasuredRun(name, seed, rows)


def test_two_runs_on_the_same_problems_are_paired() -> None:
    worse, better = run("a", 0, [0] * 8 + [1, 1]), run("b", 0, [1] * 10)
    (test,) = group_tests([worse], [better], ("A", "B"))
    assert test.how == "paired over problems"
    assert test.difference == pytest.approx(0.8)
    assert test.shown
    assert test.describe().startswith("b is better: +80.0 points")
    (back,) = group_tests([better], [worse], ("B", "A"))
    assert back.describe().startswith("b is better: -80.0 points")


def test_a_difference_whose_interval_holds_zero_is_not_called_one() -> None:
    (test,) = group_tests([run("a", 0, [0, 0, 1, 1])], [run("b", 0, [0, 1, 1, 1])], ("A", "B"))
    assert test.difference == pytest.approx(0.25)
    assert not test.shown
    assert test.describe().startswith("no difference is shown: +25.0 points")


def test_one_run_each_on_other_problems_is_unpaired() -> None:
    (test,) = group_tests([run("a", 0, [0, 1])], [run("b", 1, [1, 1], "q")], ("A", "B"))
    assert test.how == "unpaired over problems"


def test_groups_of_seeds_are_compared_over_seeds_and_pairs_by_seed() -> None:
    first = [run("a", 0, [0, 1, 0, 1]), run("b", 1, [0, 0, 0, 1], "q")]
    second = [run("c", 0, [1, 1, 1, 1]), run("d", 1, [1, 1, 0, 1], "q")]
    tests = group_tests(first, second, ("A", "B"))
    assert [t.how for t in tests] == ["over seeds", *["paired over problems"] * 2]
    assert [(t.first, t.second) for t in tests] == [("A", "B"), ("a", "c"), ("b", "d")]
    assert group_tests(first, [], ("A", "B")) == []


def test_runs_of_other_seeds_are_paired_only_where_nothing_else_is_known() -> None:
    first = [run("a", 0, [0, 1]), run("b", 1, [0, 0])]
    second = [run("c", 0, [1, 1]), run("d", 2, [1, 1])]
    tests = group_tests(first, second, ("A", "B"))
    assert [(t.first, t.second) for t in tests] == [("A", "B"), ("a", "c")]
    (only,) = group_tests(first, [run("e", 5, [1, 1])], ("A", "B"))
    assert (only.how, only.first, only.second) == ("paired over problems", "a", "e")


def test_the_interval_over_seeds_is_welchs() -> None:
    # rates .2 .4 and .7 .9 of 1000: variances .02 each, beyond those of drawing problems;
    # difference .5, standard error sqrt(.02), 2 degrees of freedom: t = 4.3027
    found = seeds_difference([(200, 1000), (400, 1000)], [(700, 1000), (900, 1000)])
    half = 4.302653 * math.sqrt(0.02)
    assert found == pytest.approx((0.5, 0.5 - half, 1.0), abs=1e-5)  # cut at 1


@pytest.mark.parametrize(("seeds", "spread"), [(2, 0.0), (3, 0.05), (5, 0.05)])
def test_the_interval_over_seeds_holds_zero_for_equal_configs(seeds: int, spread: float) -> None:
    draw, problems = np.random.default_rng(seeds), 100

    def group() -> list[tuple[int, int]]:
        rates = np.clip(0.5 + spread * draw.standard_normal(seeds), 0, 1)
        return [(int(draw.binomial(problems, rate)), problems) for rate in rates]

    held = 0
    for _ in range(1000):
        _, low, high = seeds_difference(group(), group())
        held += low <= 0 <= high
    assert held >= 950


def test_equal_accuracies_of_few_seeds_show_nothing_by_themselves() -> None:
    _, low, high = seeds_difference([(1, 4), (1, 4)], [(2, 4), (2, 4)])
    assert low < 0 < high
    with pytest.raises(ValueError, match="at least 2"):
        seeds_difference([(1, 4)], [(1, 4), (2, 4)])
