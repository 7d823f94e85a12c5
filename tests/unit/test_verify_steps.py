"""When a step computed again counts as the one recorded: classes, and on which machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.core.errors import RunError
from posttrain.core.store.ancestry import Made
from posttrain.core.training.step_record import StepRecord
from posttrain.pipelines.analysis.replay_comparison import ComparedStep, Difference, StepSource
from posttrain.pipelines.analysis.verify_stage import StageFiles
from posttrain.pipelines.analysis.verify_steps import (
    APART,
    CLOSE,
    EXACT,
    check_final_weights,
    class_of,
    judge,
)

BATCH = ("prompt_ids", "response_ids", "rollout_logprobs", "rewards", "advantages")
RECORD = StepRecord(
    3, dict.fromkeys(BATCH, "0" * 16), {"policy/w": "0" * 16}, {}, {"loss/total": 50.0}
)
ELSEWHERE = ["not as it was when the step was taken: processor AMD EPYC then, Intel Xeon now"]


def differs(name: str, gap: float | None = None) -> Difference:
    return Difference(3, name, (4,), gap)


@pytest.mark.parametrize(
    ("differences", "reached"),
    [
        ((), EXACT),
        ((differs("rollout_logprobs", 0.009), differs("policy/w")), CLOSE),
        ((differs("rollout_logprobs", 0.02),), APART),
        ((differs("metric loss/total", 0.4),), CLOSE),
        ((differs("metric loss/total", 0.6),), APART),
        ((differs("rewards", 1e-6),), APART),
        ((differs("response_ids", 1.0),), APART),
        ((differs("advantages"),), APART),
        ((differs("policy/w", 0.5),), APART),
    ],
)
def test_a_step_reaches_a_class(differences: tuple[Difference, ...], reached: str) -> None:
    assert class_of(ComparedStep(3, 6, 1, differences), RECORD) == reached


def judged(notes: list[str], *differences: Difference) -> tuple[str, str]:
    made = Made("rl", "rl", "f" * 64, Path("rl-ffff"), 1.0, "", {}, {})
    source = StepSource("rl", Path("x"), {3: RECORD}, Path("x"), None, 3, None)
    step = ComparedStep(3, 6, 1, differences)
    done = judge(StageFiles(made, made.folder), source, [3], [step], notes, "computed again")
    return done.check.outcome, done.reached


def test_close_is_accepted_from_another_machine_alone() -> None:
    near = differs("rollout_logprobs", 0.001)
    assert judged([], near) == ("differs", CLOSE)
    assert judged(ELSEWHERE, near) == ("equal", CLOSE)
    assert judged([]) == ("equal", EXACT)


def test_a_changed_plugin_is_no_other_machine() -> None:
    for what in ("reward plugin mine", "rollout_engine plugin transformers", "machine"):
        note = f"not as it was when the step was taken: {what} 1.0 then, 1.1 now"
        assert judged([note], differs("rollout_logprobs", 0.001)) == ("differs", CLOSE)


def test_nothing_is_concluded_from_other_samples() -> None:
    """Elsewhere sampling may go another way; rewards that differ on equal samples may not."""
    other = (differs("response_ids", 9.0), differs("rewards", 1.0))
    assert judged(ELSEWHERE, *other)[0] == "not checked"
    assert judged([], *other)[0] == "differs"
    assert judged(ELSEWHERE, differs("rewards", 1.0))[0] == "differs"


@pytest.mark.parametrize("content", [b"", b"\x10\0\0\0\0\0\0\0{cut", b"other" * 99])
def test_saved_weights_that_cannot_be_read_differ(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    made = Made("rl", "rl", "f" * 64, tmp_path, 1.0, "", {}, {})
    source = StepSource("rl", tmp_path, {3: RECORD}, tmp_path / "none", None, 3, path)
    check = check_final_weights(StageFiles(made, tmp_path), source)
    assert check is not None and check.outcome == "differs"
    assert check.detail.startswith("model.safetensors cannot be read: ")
    with pytest.raises(RunError, match="model.safetensors cannot be read .* changed after the run"):
        source.weights_after(3, ("policy/w",))
