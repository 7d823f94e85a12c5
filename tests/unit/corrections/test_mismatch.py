"""Diagnostics of engine against trainer, and effective sample sizes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.math.correction import (
    effective_sample_size,
    mismatch_metrics,
)
from posttrain.core.tracking.metric_names import check_names

NAN = float("nan")
weights = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20)


@pytest.mark.parametrize(
    ("values", "wanted"),
    [([1, 1, 1, 5], 0.571429), ([3, 3, 3], 1.0), ([0, 0, 0, 7], 0.25), ([1e300, 1e300], 1.0)],
)
def test_effective_sample_size(values: list[float], wanted: float) -> None:
    got = effective_sample_size(torch.tensor(values, dtype=torch.float64))
    assert got == pytest.approx(wanted, abs=1e-6)


@given(weights, st.floats(1e-3, 1e3))
def test_the_sample_size_is_between_one_sample_and_all_whatever_the_scale(
    values: list[float], scale: float
) -> None:
    tensor = torch.tensor(values, dtype=torch.float64)
    size = effective_sample_size(tensor)
    assert 1 / len(values) - 1e-12 <= size <= 1 + 1e-12
    assert effective_sample_size(scale * tensor) == pytest.approx(size)


def test_nothing_has_no_sample_size() -> None:
    assert math.isnan(effective_sample_size(torch.zeros(3)))
    assert math.isnan(effective_sample_size(torch.zeros(0)))


TRAINER = torch.tensor([[0.5, 0.25, NAN], [0.5, NAN, NAN]], dtype=torch.float64).log()
ENGINE = torch.tensor([[0.25, 0.5, NAN], [0.125, NAN, NAN]], dtype=torch.float64).log()
MASK = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])


def test_the_numbers_of_three_tokens() -> None:
    # e^d is 2, 1/2 in the first response and 4 in the second; their products are 1 and 4.
    got = mismatch_metrics(TRAINER, ENGINE, MASK)
    log2 = math.log(2)
    assert got == pytest.approx(
        {
            "mismatch/k1": -2 * log2 / 3,
            "mismatch/k3": ((2 - 1 - log2) + (0.5 - 1 + log2) + (4 - 1 - 2 * log2)) / 3,
            "mismatch/abs_max": 2 * log2,
            "mismatch/abs_mean": 4 * log2 / 3,
            "mismatch/prob_abs_max": 0.375,
            "mismatch/ppl_ratio": (1 + 1 / 4) / 2,
            "mismatch/chi2_token": (4 + 0.25 + 16) / 3 - 1,
            "mismatch/chi2_seq": (1 + 16) / 2 - 1,
            "ess/token": 6.5**2 / (3 * 20.25),
            "ess/seq": 25 / (2 * 17),
        }
    )
    check_names(got)


def test_rows_without_tokens_count_only_if_asked() -> None:
    empty = torch.zeros(1, 3, dtype=torch.float64)
    tensors = [torch.cat([x, empty]) for x in (TRAINER, ENGINE, MASK.double())]
    assert mismatch_metrics(*tensors) == mismatch_metrics(TRAINER, ENGINE, MASK)
    counted = mismatch_metrics(*tensors, count_empty_seqs=True)
    assert counted["mismatch/chi2_seq"] == pytest.approx((1 + 16 + 1) / 3 - 1)
    assert counted["mismatch/chi2_token"] == pytest.approx((4 + 0.25 + 16) / 3 - 1)


def test_one_policy_has_no_mismatch_and_an_engine_without_log_probs_none_to_report() -> None:
    same = mismatch_metrics(TRAINER, TRAINER, MASK)
    assert {name: same[name] for name in same if not name.startswith("ess")} == pytest.approx(
        dict.fromkeys((n for n in same if n.startswith("mismatch")), 0.0)
        | {"mismatch/ppl_ratio": 1}
    )
    assert same["ess/token"] == same["ess/seq"] == 1.0
    unknown = torch.full_like(TRAINER, NAN)
    assert mismatch_metrics(TRAINER, unknown, MASK) == {}
    half = torch.where(torch.arange(3) < 1, ENGINE, NAN)
    assert mismatch_metrics(TRAINER, half, MASK)["mismatch/k1"] == pytest.approx(
        -(math.log(2) + math.log(4)) / 2
    )
