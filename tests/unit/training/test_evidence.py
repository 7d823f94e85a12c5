"""What is kept of a step is what its update read, whole, within its size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from posttrain.core.analysis.evidence import (
    EvidenceKeeper,
    StepEvidence,
    read_step,
    rows_path,
    steps_in,
    tensors_path,
    write_step,
)
from posttrain.core.errors import RunError
from posttrain.core.types import (
    Message,
    Problem,
    RewardSample,
    Score,
    StepVerdict,
    ToolCall,
    Verdict,
)
from tests.helpers.rollouts import ragged_batch


def evidence(step: int = 3) -> StepEvidence:
    batch = ragged_batch([3, 2], group_size=2)
    said = Message(
        "assistant", "", (ToolCall("add", {"a": [2]}, "1"),), reasoning="hm", train=False
    )
    chat = (Message("system", "s"), Message("user", "2+2"), said, Message("tool", "4"))
    tool = {"type": "function", "function": {"name": "add"}}
    problem = Problem("k", "2+2", "4", "2+2=4", {"level": "1"}, chat, (tool,))
    verdict = StepVerdict(2, 1.0)
    sample = RewardSample(
        problem, (1, 2), (3,), "4", False, Verdict(1.0, "4"), (verdict,), "4 é", ("4",)
    )
    score = Score(0.5, "ok", "half", (verdict,), {"part": 0.5})
    batch = replace(
        batch,
        problems=(problem,) * 4,
        texts=("a", "b", "", "é\n"),
        samples=(sample,) * 4,
        scores=((score, Score(None, "timeout")),) * 4,
    ).with_columns(advantages=torch.randn(batch.mask.shape))
    seen = torch.randn(batch.mask.shape)
    seen[1] = float("nan")
    ids = {int(i): f"<{i}>x" for i in batch.response_ids.unique()}
    return StepEvidence(step, batch, seen, seen + 1, torch.tensor([0, -1, 1, 1]), 0.1, ("r",), ids)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    kept = evidence()
    write_step(tmp_path, kept)
    found = read_step(tmp_path, 3)
    assert found.batch.columns() == kept.batch.columns()
    for name in found.batch.columns():
        assert torch.equal(found.batch.column(name), kept.batch.column(name)), name
    for name in ("seen_logprobs", "seen_entropy", "seen_by"):
        assert torch.equal(
            getattr(found, name).nan_to_num(99.0), getattr(kept, name).nan_to_num(99.0)
        )
    for name in ("problems", "texts", "samples", "scores", "turns", "transcripts"):
        assert getattr(found.batch, name) == getattr(kept.batch, name), name
    assert (found.step, found.kl_coef, found.component_names) == (3, 0.1, ("r",))
    own = found.batch.response_ids[3][found.batch.response_mask[3].bool()].tolist()
    assert [found.token_text(token) for token in own] == [f"<{token}>x" for token in own]
    assert found.token_text(10**9) == "<1000000000>"


def test_a_step_that_is_not_there_or_damaged_is_refused_with_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="none of any step"):
        read_step(tmp_path, 1)
    write_step(tmp_path, evidence())
    with pytest.raises(RunError, match="it has steps 3"):
        read_step(tmp_path, 1)
    whole = tensors_path(tmp_path, 3).read_bytes()
    tensors_path(tmp_path, 3).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RunError, match="cannot be read"):
        read_step(tmp_path, 3)
    tensors_path(tmp_path, 3).write_bytes(whole)
    rows_path(tmp_path, 3).write_bytes(b"no parquet")
    with pytest.raises(RunError, match="cannot be read"):
        read_step(tmp_path, 3)


def keep(folder: Path, steps: range, max_bytes: float, through: int = 0) -> EvidenceKeeper:
    keeper = EvidenceKeeper(folder, max_bytes, through)
    for step in steps:
        keeper.put(evidence(step))
    keeper.close()
    return keeper


def test_all_steps_stay_while_they_fit(tmp_path: Path) -> None:
    keep(tmp_path, range(1, 6), 1e9)
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5]


def test_beyond_the_size_every_second_or_fourth_step_stays_with_the_first_and_the_newest(
    tmp_path: Path,
) -> None:
    size = write_step(tmp_path / "one", evidence())
    keep(tmp_path / "all", range(1, 13), 4.5 * size)
    assert steps_in(tmp_path / "all") == [1, 5, 9, 12]
    found = sum(path.stat().st_size for path in (tmp_path / "all").iterdir())
    assert found <= 4.5 * size


def test_one_step_that_is_larger_than_the_size_is_kept_all_the_same(tmp_path: Path) -> None:
    keep(tmp_path, range(1, 4), 1.0)
    assert steps_in(tmp_path) == [1, 3]


def test_a_resumed_stage_keeps_what_is_behind_it_alone(tmp_path: Path) -> None:
    keep(tmp_path, range(1, 6), 1e9)
    keep(tmp_path, range(4, 5), 1e9, through=3)
    assert steps_in(tmp_path) == [1, 2, 3, 4]
    assert rows_path(tmp_path, 4).is_file() and not rows_path(tmp_path, 5).exists()
