"""A model learns from what it does after it has read an answer, and from two teachers, by the real
command; no stage has a reward but `sdpo`, which needs to know what a success is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.learning import SEEDS, final
from tests.helpers.self_distilling import (
    FORWARD,
    SDFT,
    SDPO,
    SIBLINGS,
    learn_from_halves,
    learn_from_siblings,
    self_distil,
)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_demonstrations_teach_without_a_reward(tmp_path: Path) -> None:
    learned = self_distil(tmp_path, 0, {"sdft": FORWARD}, copy_steps=60, steps=8)
    verdicts = learned.history("sdft", "acc/mean")
    assert verdicts[0] < 0.2 and verdicts[-1] > 0.4
    assert learned.history("sdft", "reward/mean") == []
    assert learned.history("sdft", "distil/skipped_frac") == [0.0] * 8
    apart = learned.history("sdft", "distil/divergence")
    assert apart[-1] < 0.5 * apart[0]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", SEEDS)
def test_sdft_learns_what_its_teacher_reads(tmp_path: Path, seed: int) -> None:
    students = {"sdft": {**SDFT, "steps": 100}, "forward": FORWARD, "sdpo": {**SDPO, "steps": 3}}
    learned = self_distil(tmp_path, seed, students, copy_steps=100, steps=25)
    reached = {name: final(learned.history(name, "acc/mean")) for name in ("sdft", "forward")}
    # The divergence of the preset has hardly a gradient where both are sure of different tokens.
    assert reached["sdft"] > 0.6 and reached["forward"] > 0.9, reached
    # Most groups have no success, and a lone one has no sibling.
    skipped = learned.history("sdpo", "distil/skipped_frac")
    assert len(skipped) == 3 and all(0.3 < share <= 1 for share in skipped)
    assert learned.history("sdpo", "distil/teacher_version") == [0.0, 1.0, 2.0]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", SEEDS)
def test_sdpo_learns_from_the_successes_of_its_siblings(tmp_path: Path, seed: int) -> None:
    """From a third of right answers: no group is without a success for long."""
    learned = learn_from_siblings(tmp_path, seed, {"sdpo": SIBLINGS}, steps=20)
    verdicts = learned.history("sdpo", "acc/mean")
    assert 0.2 < verdicts[0] < 0.5 and final(verdicts) > 0.85, verdicts
    skipped = learned.history("sdpo", "distil/skipped_frac")
    assert final(skipped) < 0.15, skipped


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", SEEDS)
def test_two_teachers_make_one_student_of_both_halves(tmp_path: Path, seed: int) -> None:
    learned = learn_from_halves(tmp_path, seed, teacher_steps=25, steps=40)
    assert final(learned.history("both", "acc/mean")) > 0.8
    for name in ("low", "high"):
        assert min(learned.history("both", f"distil/tokens/{name}")) > 0
