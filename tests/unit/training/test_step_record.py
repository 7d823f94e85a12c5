"""Digests of tensors, the record of steps, and what a comparison with it finds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from posttrain.core.errors import RunError
from posttrain.core.training.digests import BLOCK, block_digests, tensor_digest
from posttrain.core.training.step_record import (
    STEPS,
    StepRecorder,
    StepTensors,
    read_record,
    values_path,
)
from posttrain.pipelines.analysis.replay_comparison import (
    ComparedStep,
    Comparison,
    Difference,
    Reached,
)

METRICS = {"loss/total": 0.5, "time/step_s": 3.0, "memory/peak_gb": 1.0, "eval/gain": 0.1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_one_element_changes_a_digest_and_nothing_else_does(dtype: torch.dtype) -> None:
    tensor = (torch.arange(3000) % 7).to(dtype).view(30, 100)
    changed = tensor.clone()
    changed[17, 31] = 1 - changed[17, 31].to(torch.int64)
    assert tensor_digest(tensor) == tensor_digest(tensor.t().contiguous().t())
    assert tensor_digest(changed) != tensor_digest(tensor)
    assert tensor_digest(tensor.view(100, 30)) != tensor_digest(tensor)
    moved = tensor.flip(0)
    assert torch.equal(moved, tensor) or tensor_digest(moved) != tensor_digest(tensor)


def test_blocks_of_a_large_weight_take_turns() -> None:
    weight = torch.randn(3 * BLOCK + 5)
    changed = weight.clone()
    changed[2 * BLOCK + 1] += 1
    differs = [
        block_digests({"w": weight}, step) != block_digests({"w": changed}, step)
        for step in range(8)
    ]
    assert differs == [False, False, True, False] * 2


def batch(shift: float = 0.0) -> dict[str, Tensor]:
    advantages = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    advantages[1, 0] += shift
    return {"response_ids": torch.tensor([[1, 2], [3, 4]]), "advantages": advantages}


def weights(shift: float = 0.0) -> dict[str, Tensor]:
    return {"policy/a": torch.ones(2, 3), "policy/b": torch.zeros(4) + shift}


def recorder(folder: Path, keep_through: int = 0, *, values: bool = True) -> StepRecorder:
    environment = {"torch": "2", "machine": f"after {keep_through}"}
    return StepRecorder(
        folder, every=1, values=values, environment=environment, keep_through=keep_through
    )


def record(folder: Path, *, values: bool = True) -> None:
    made = recorder(folder, values=values)
    for step in (1, 2, 3):
        made.put(step, StepTensors(batch(), weights()), METRICS)


def test_a_resumed_stage_keeps_the_steps_before_and_says_who_took_which(tmp_path: Path) -> None:
    record(tmp_path)
    with (tmp_path / STEPS).open("a") as stream:
        stream.write('{"step": 4, "ba')  # cut short by a kill
    resumed = recorder(tmp_path, keep_through=2)
    assert sorted(read_record(tmp_path)) == [1, 2], "step 3 is taken again"
    resumed.put(3, StepTensors({}, weights()), {})
    found = read_record(tmp_path)
    assert sorted(found) == [1, 2, 3]
    assert found[2].environment["machine"] == "after 0"
    assert found[3].environment["machine"] == "after 2"
    assert found[2].metrics == {"loss/total": 0.5}, "what is measured is not part of it"
    assert recorder(tmp_path) and read_record(tmp_path) == {}, "a new stage begins again"


def test_a_line_that_is_no_record_is_told_by_its_place(tmp_path: Path) -> None:
    record(tmp_path)
    path = tmp_path / STEPS
    path.write_text(path.read_text().replace('{"step":2', '{"stop":2'))
    with pytest.raises(RunError, match=r"steps.jsonl:3.*--no-cache"):
        read_record(tmp_path)


def compare(
    folder: Path,
    now: StepTensors,
    metrics: Mapping[str, float] = METRICS,
    kept: Mapping[str, Tensor] | None = None,
) -> tuple[Difference, ...]:
    reported: list[ComparedStep] = []
    comparison = Comparison(
        folder, read_record(folder), 2, lambda step, names: kept or {}, reported.append
    )
    with pytest.raises(Reached):
        comparison.put(2, now, metrics)
    assert comparison.steps == reported
    return reported[0].differences


def test_the_same_step_is_equal_whatever_the_clock_says(tmp_path: Path) -> None:
    record(tmp_path)
    assert compare(tmp_path, StepTensors(batch(), weights()), {"loss/total": 0.5}) == ()


def test_what_differs_is_told_in_the_order_of_computing_with_its_size(tmp_path: Path) -> None:
    record(tmp_path)
    now = StepTensors(batch(shift=0.25), weights(shift=0.125))
    found = compare(tmp_path, now, {"loss/total": 0.75}, kept=weights())
    assert [d.name for d in found] == ["advantages", "policy/b", "metric loss/total"]
    assert (found[0].max_abs, found[0].where, found[0].shape) == (0.25, (1, 0), (2, 2))
    assert (found[1].max_abs, found[1].where) == (0.125, (0,))
    assert found[2].max_abs == 0.25
    assert str(found[0]) == ("step 2: advantages (2 x 2), max abs difference 0.25, first at [1, 0]")


def test_without_values_it_is_said_what_would_have_kept_them(tmp_path: Path) -> None:
    record(tmp_path, values=False)
    assert not values_path(tmp_path, 2).exists()
    found = compare(tmp_path, StepTensors(batch(shift=1.0), weights(shift=1.0)))
    assert [(d.name, d.max_abs) for d in found] == [("advantages", None), ("policy/b", None)]
    assert "keep.values" in found[0].note and "keep.every" in found[1].note


def test_a_changed_record_is_told_from_a_changed_weight(tmp_path: Path) -> None:
    record(tmp_path)
    path = tmp_path / STEPS
    digest = read_record(tmp_path)[2].weights["policy/b"]
    path.write_text(path.read_text().replace(digest, "0" * 16))
    (found,) = compare(tmp_path, StepTensors(batch(), weights()), kept=weights())
    assert found.name == "policy/b" and found.max_abs == 0.0
    assert "the record was changed" in found.note


def test_a_shape_that_changed_is_a_difference_of_its_own(tmp_path: Path) -> None:
    record(tmp_path)
    longer = batch() | {"advantages": torch.ones(2, 3)}
    (found,) = compare(tmp_path, StepTensors(longer, weights()))
    assert found.shape == (2, 3) and found.note == "its shape was 2 x 2"
