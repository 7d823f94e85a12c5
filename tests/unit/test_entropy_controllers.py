"""The coefficient of the entropy bonus: by hand, in the learner, through a checkpoint's state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from posttrain.core.contracts import EntropyController
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.plugin_manager import PluginManager
from tests.helpers.rollouts import load_tiny, ragged_batch
from tests.helpers.updates import update
from tests.unit.test_learner_terms import make_learner

MANAGER = PluginManager()


def test_the_bonus_acts_one_step_late() -> None:
    controller = MANAGER.build(EntropyController, "adaptive", {"delta": 0.005, "target": 0.2})
    applied, after = [], []
    for entropy in (0.1, 0.1, 0.1, 0.3, 0.1):
        applied.append(controller.coefficient())
        controller.update(entropy)
        after.append(controller.state()["coef"])
    assert applied == pytest.approx([0, 0.005, 0.01, 0.015, 0])
    assert after == pytest.approx([0.005, 0.01, 0.015, 0.01, 0.015])
    controller.update(float("nan"))
    assert controller.coefficient() == pytest.approx(0.015)


def test_it_starts_within_its_bounds_and_stays_there() -> None:
    fields = {"coef": 0.01, "min_coef": 0.008, "max_coef": 0.012}
    controller = MANAGER.build(EntropyController, "adaptive", fields)
    for entropy, coef in ((0.1, 0.012), (0.9, 0.008), (0.9, 0.008)):
        controller.update(entropy)
        assert controller.state()["coef"] == pytest.approx(coef)
    with pytest.raises(ValidationError, match="must lie within min_coef"):
        MANAGER.config("entropy_controller", "adaptive", {**fields, "coef": 0.02})


def test_the_learner_moves_it_after_each_optimizer_step(tmp_path: Path) -> None:
    """Four updates on two batches: 0 in the first, then one delta more in each, over a resume."""
    fields = {"delta": 0.01, "target": 100}
    batch, model_dir = ragged_batch([5, 4, 6, 3], group_size=2), make_tiny_model(tmp_path / "m")
    found = []
    state: dict[str, float] = {}
    for step in (1, 2):
        controller = MANAGER.build(EntropyController, "adaptive", fields)
        if state:
            controller.load_state(json.loads(json.dumps(state)))
        learner = make_learner(
            load_tiny(model_dir), MANAGER, num_mini_batches=2, entropy_controller=controller
        )
        metrics = update(learner, batch, step, 0.0).metrics
        found.append((metrics["entropy/coef"], metrics["loss/entropy"] < 0))
        state = learner.objective.stateful()["entropy_controller"].state()
        assert state["entropy"] == pytest.approx(metrics["entropy/mean"], rel=0.1)
    assert found == [(pytest.approx(0.005), True), (pytest.approx(0.025), True)]
    assert state["coef"] == pytest.approx(0.04)
