"""Every number recorded from verl 0.9.1 and TRL 1.16.0: values, metrics and gradients, in float64,
but those of `VERL_ALONE`.

The cases lie in `data/`; its README says where they come from. The bridge is `adapter.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.golden.adapter import RUNNERS, VERL_ALONE, Case, run_case

DATA = Path(__file__).with_name("data")
SHARED = Path(__file__).resolve().parents[3] / "shared"
RECORDED = [*(SHARED / "golden").glob("*.json"), *(SHARED / "golden-2").glob("*.json")]
CASES: list[Case] = [
    case for path in sorted(DATA.glob("*.json")) for case in json.loads(path.read_text("utf-8"))
]


def assert_same(got: Any, wanted: Any, case: Case, place: str) -> None:
    """Equal within the case's tolerance; tensors where its `compare_mask` is 1."""
    if isinstance(wanted, dict):
        for name, value in wanted.items():
            if name.rpartition("/")[2] in VERL_ALONE:
                continue
            assert_same(got[name], value, case, f"{place}.{name}")
        return
    found = got.detach().numpy() if isinstance(got, torch.Tensor) else got
    ours, theirs = (np.array(x, dtype=np.float64) for x in (found, wanted))
    assert ours.shape == theirs.shape, place
    if case.get("compare_mask"):
        mask = np.array(case["inputs"][case["compare_mask"]], dtype=bool)
        if mask.shape == theirs.shape:
            ours, theirs = ours[mask], theirs[mask]
    np.testing.assert_allclose(ours, theirs, err_msg=place, **case["tol"])


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_the_peer_gives_the_same_numbers(case: Case) -> None:
    assert_same(run_case(case), case["outputs"], case, "outputs")


def test_there_are_371_cases_and_every_runner_has_some() -> None:
    assert len(CASES) == len({case["id"] for case in CASES}) == 371
    assert set(RUNNERS) == {(case["kind"], case["function"]) for case in CASES}


def case_of(function: str, **params: Any) -> Case:
    """The first recorded case of a function with other parameters; its outputs are not theirs."""
    found = next(case for case in CASES if case["function"] == function)
    return {**found, "params": {**found["params"], **params}}


def test_verl_averages_sapo_over_sequences_whatever_the_mode() -> None:
    name = "compute_policy_loss_sapo"
    by_mode = [
        run_case(case_of(name, loss_agg_mode=mode))["loss"] for mode in ("token-mean", "token-sum")
    ]
    assert by_mode[0] == by_mode[1]
    rows = sum(any(row) for row in case_of(name)["inputs"]["response_mask"])
    info = {"global_batch_size": 4 * rows, "dp_size": 2, "batch_num_tokens": 7}
    scaled = run_case(case_of(name, global_batch_info=info))["loss"]
    torch.testing.assert_close(scaled, by_mode[0] / 2)


def test_the_mask_of_a_verl_correction_without_rejection_is_the_response_mask() -> None:
    name = "compute_rollout_correction_and_rejection_mask"
    case = case_of(name, rollout_is_threshold="0.5_2.0", rollout_rs=None)
    mask = run_case(case)["mask"]
    assert isinstance(mask, torch.Tensor) and mask.tolist() == case["inputs"]["response_mask"]


def test_trl_divides_the_entropy_by_the_accumulation_steps_whatever_the_loss() -> None:
    case = next(
        case
        for case in CASES
        if case["id"].startswith("trl-policy_loss") and case["params"].get("entropy_coef")
    )
    items = {"loss_type": "dapo", "num_items_in_batch": 30}
    without = case["params"] | items | {"entropy_coef": 0.0}
    plain = run_case({**case, "params": without})["loss"]
    bonus = {}
    for steps in (1, 4):
        params = case["params"] | items | {"gradient_accumulation_steps": steps}
        bonus[steps] = run_case({**case, "params": params})["loss"] - plain
    torch.testing.assert_close(bonus[4], bonus[1] / 4)
    assert bonus[1] < 0


def test_a_wrong_number_is_noticed() -> None:
    """The comparison itself can fail: each output of a few cases, moved by ten tolerances."""
    for case in CASES[::30]:
        for name, value in case["outputs"].items():
            if isinstance(value, dict):
                continue
            numbers = np.array(value, dtype=np.float64)
            tolerance = case["tol"]["atol"] + case["tol"]["rtol"] * np.abs(numbers)
            moved = {**case["outputs"], name: (numbers + 10 * tolerance + 1e-12).tolist()}
            with pytest.raises(AssertionError):
                assert_same(run_case(case), moved, case, "outputs")


@pytest.mark.skipif(not RECORDED, reason=f"no original recordings at {SHARED}")
def test_the_copies_are_the_recordings() -> None:
    recorded = {path.name: path for path in RECORDED}
    for path in sorted(DATA.glob("*.json")):
        assert json.loads(path.read_text("utf-8")) == json.loads(recorded[path.name].read_text())
