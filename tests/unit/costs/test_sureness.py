"""How much alike a policy's answers are taken to be, as it learns."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from posttrain.core.config.rl_stage import RlStage
from posttrain.core.costs.sureness import (
    ALIKE,
    PARTS,
    ROUNDED,
    ROWS_TO_BE_SURE,
    SURE,
    UNSURE,
    alike,
    answers,
    entropy,
    idle_groups,
    rows_learned,
)
from posttrain.core.costs.work import Work
from tests.helpers.costs import estimator, run_config
from tests.helpers.tiny import make_tiny_model

RL = {"kind": "rl", "algorithm": "grpo", "prompts_per_step": 4, "num_generations": 4}
STAGES: dict[str, dict[str, Any]] = {
    "sft": {"kind": "sft", "inputs": {"model": "base"}, "steps": 3, "batch_size": 8},
    "rl": {**RL, "inputs": {"model": "sft"}, "steps": 10},
    "more": {**RL, "inputs": {"model": "rl"}, "steps": 5},
    "alone": {**RL, "inputs": {"model": "base"}, "steps": 10},
    "after": {**RL, "inputs": {"model": "alone"}, "steps": 5},
}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Work:
    model = make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")
    return estimator(run_config(model, STAGES)).work


def stage(work: Work, name: str) -> RlStage:
    found = work.config.stages[name]
    assert isinstance(found, RlStage)
    return found


def test_a_policy_learns_from_worked_answers_and_from_its_own_after_them(work: Work) -> None:
    rows = {name: rows_learned(work.config, stage(work, name)) for name in STAGES if name != "sft"}
    assert rows == {"rl": 3 * 8, "more": 3 * 8 + 10 * 16, "alone": 0, "after": 0}


def test_entropy_falls_as_rows_are_learned_from(work: Work) -> None:
    def left(rows: float) -> float:
        return SURE + (UNSURE - SURE) * math.exp(-rows / ROWS_TO_BE_SURE)

    rl = stage(work, "rl")
    assert [entropy(work, rl, done) for done in (0.0, 0.5, 1.0)] == pytest.approx(
        [left(24), left(24 + 80), left(24 + 160)]
    )
    assert entropy(work, stage(work, "more")) == pytest.approx(left(24 + 160))
    assert {entropy(work, stage(work, "alone"), done) for done in (0.0, 1.0)} == {UNSURE}


@pytest.mark.parametrize("how", ["bfloat16", "autocast"])
def test_in_bfloat16_it_falls_later(work: Work, how: str) -> None:
    """Weights that were rounded do not show small updates until enough of them have added up."""
    if how == "bfloat16":
        rounded = replace(work, bytes_each=2)
    else:
        section = work.config.model.model_copy(update={"dtype": "autocast"})
        rounded = replace(work, config=work.config.model_copy(update={"model": section}))
    rl = stage(work, "rl")
    share = (entropy(rounded, rl) - SURE) / (UNSURE - SURE)
    assert share == pytest.approx(math.exp(-24 / (ROUNDED * ROWS_TO_BE_SURE)))
    assert idle_groups(rounded, rl) < idle_groups(work, rl)
    some = answers(rounded, rl, 8).computed(4)
    assert some > answers(work, rl, 8).computed(4), "so that less is computed once for several"


def test_a_step_is_the_mean_of_the_stage_s_parts(work: Work) -> None:
    rl = stage(work, "rl")
    shares = [alike(entropy(work, rl, done)) for done in PARTS]
    assert shares == sorted(shares) and shares[0] < shares[-1] < ALIKE
    assert idle_groups(work, rl) == pytest.approx(sum(shares) / 4)
    assert idle_groups(work, stage(work, "alone")) == 0.0, "nothing is guessed of it"
