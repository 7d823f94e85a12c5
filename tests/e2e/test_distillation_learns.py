"""A student whose stage has no reward comes to do its teacher's task, by the real command."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.distilling import BY_TEXT, ITSELF, STUDENTS, distil, distil_texts
from tests.helpers.learning import SEEDS, final

pytestmark = pytest.mark.usefixtures("shared_prefect")


def test_a_student_follows_its_teacher_without_a_reward(tmp_path: Path) -> None:
    students = {"gkd": STUDENTS["gkd"], "itself": ITSELF}
    learned = distil(tmp_path, 0, students, teacher_steps=12, steps=8)
    verdicts = learned.history("gkd", "acc/mean")
    teacher = learned.history("big", "acc/mean")[-1]
    assert teacher > 0.6 and verdicts[0] < 0.2 and verdicts[-1] > 0.4
    assert learned.history("gkd", "reward/mean") == []
    apart = learned.history("gkd", "distil/divergence")
    assert apart[-1] < 0.3 * apart[0]
    # The other one is taught by what it would say after it has read the answer.
    assert learned.history("itself", "distil/teacher_version") == [0.0, 1.0]
    assert learned.history("itself", "distil/skipped_frac") == [0.0, 0.0]
    assert learned.history("itself", "reward/mean") == []
    assert all(value > 0 for value in learned.history("itself", "distil/divergence"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_way_to_learn_from_a_teacher_reaches_it(tmp_path: Path, seed: int) -> None:
    learned = distil(tmp_path, seed, STUDENTS, teacher_steps=25, steps=25)
    assert final(learned.history("big", "acc/mean")) > 0.9
    reached = {name: final(learned.history(name, "acc/mean")) for name in STUDENTS}
    assert all(value > 0.85 for value in reached.values()), reached


@pytest.mark.slow
def test_a_student_follows_a_teacher_of_another_tokenizer(tmp_path: Path) -> None:
    learned = distil_texts(tmp_path, 0, {"uld": BY_TEXT["uld"]}, steps=6)
    verdicts = learned.history("uld", "acc/mean")
    assert verdicts[0] < 0.2 and verdicts[-1] > 0.4
    apart = learned.history("uld", "distil/divergence")
    assert apart[-1] < 0.5 * apart[0]
    assert learned.history("uld", "distil/tokens_per_stretch")[-1] == 1  # digits are single tokens


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", SEEDS)
def test_it_reaches_a_teacher_of_another_tokenizer(tmp_path: Path, seed: int) -> None:
    learned = distil_texts(tmp_path, seed, BY_TEXT, steps=25)
    reached = {name: final(learned.history(name, "acc/mean")) for name in BY_TEXT}
    assert all(value > 0.9 for value in reached.values()), reached


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", SEEDS)
def test_it_learns_how_to_end(tmp_path: Path, seed: int) -> None:
    long = {**BY_TEXT["uld"], "generation": {"max_response_length": 6}}
    learned = distil_texts(tmp_path, seed, {"uld": long}, steps=50, end="</s>")
    cut = learned.history("uld", "resp_len/truncated_frac")
    assert cut[0] > 0.5 and final(cut) < 0.1
    assert final(learned.history("uld", "acc/mean")) > 0.7


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_texts_on_two_ranks_as_in_one_process(tmp_path: Path) -> None:
    students = {"uld": {**BY_TEXT["uld"], "micro_batch_size": 32}}
    curves = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        learned = distil_texts(folder, 0, students, steps=4, ranks=ranks)
        curves.append([learned.history("uld", f"{m}") for m in ("acc/mean", "distil/divergence")])
    assert curves[0][0] == curves[1][0]
    assert curves[0][1] == pytest.approx(curves[1][1], rel=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_on_two_ranks_as_in_one_process(tmp_path: Path) -> None:
    students = {name: STUDENTS[name] for name in ("opd", "gkd", "candidates")}
    curves = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        learned = distil(folder, 0, students, teacher_steps=12, steps=4, ranks=ranks)
        curves.append({name: learned.history(name, "acc/mean") for name in students})
    assert curves[0] == curves[1]
