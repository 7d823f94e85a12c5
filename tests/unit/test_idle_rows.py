"""Rows that teach nothing are left out of an update, and nothing but its cost changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.config.sections import OptimizerSection
from posttrain.core.contracts import Aggregator, EntropyController, KlEstimator, PolicyLoss
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.training import forward
from posttrain.core.training.learner import Learner
from posttrain.core.training.objective import LossTerm, Objective
from posttrain.core.training.optim import MasterOptimizer
from posttrain.core.training.updates import UpdateSettings
from tests.helpers.rollouts import load_tiny, ragged_batch
from tests.helpers.updates import update

IDLE = [3, 4, 5, 8]  # a whole group and one row


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def batch_with_idle_rows(idle: list[int]) -> RolloutBatch:
    batch = ragged_batch([5, 9, 3], group_size=3)
    advantages = batch.column("advantages").clone()
    advantages[idle] = 0.0
    return batch.with_columns(advantages=advantages)


def make_learner(
    model_dir: Path, manager: PluginManager, skip: bool, loss: str = "ppo_clip", **options: Any
) -> Learner:
    mean = manager.build(Aggregator, "token-mean")
    term = LossTerm(manager.build(PolicyLoss, loss), mean)
    objective = Objective((term,), mean, kl=manager.build(KlEstimator, "k3"), **options)
    model = load_tiny(model_dir)
    settings = UpdateSettings(1, 1, 4, 1.0, 0, skip_idle_rows=skip)
    optimizer = MasterOptimizer(model, OptimizerSection(learning_rate=1e-3), 10)
    return Learner(model, optimizer, objective, settings)


def parameters(learner: Learner) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in learner.model.parameters()]


def rows_computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the number of rows of each forward pass with gradient."""
    found: list[int] = []
    whole = forward.response_states

    def counted(model: Any, batch: RolloutBatch, *, include_last: bool) -> Any:
        found.append(len(batch))
        return whole(model, batch, include_last=include_last)

    monkeypatch.setattr(forward, "response_states", counted)
    return found


def test_idle_rows_are_not_computed_and_the_step_is_the_same(
    model_dir: Path, manager: PluginManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_computed(monkeypatch)
    after, metrics = {}, {}
    for skip in (False, True):
        learner = make_learner(model_dir, manager, skip)
        metrics[skip] = update(learner, batch_with_idle_rows(IDLE), 0, 0.0).metrics
        after[skip] = parameters(learner)
    assert rows == [4, 4, 1, 4], "9 rows, then those with a token and an advantage"
    for left, right in zip(after[True], after[False], strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=2e-6)
    assert metrics[True]["grad/norm"] == pytest.approx(metrics[False]["grad/norm"], rel=1e-5)
    assert metrics[True]["loss/policy"] == pytest.approx(metrics[False]["loss/policy"], abs=1e-6)
    assert metrics[True]["train/idle_rows"] == len(IDLE) and metrics[False]["train/idle_rows"] == 0


def test_a_batch_of_idle_rows_is_an_update_by_momentum_alone(
    model_dir: Path, manager: PluginManager
) -> None:
    after = {}
    for skip in (False, True):
        learner = make_learner(model_dir, manager, skip)
        update(learner, batch_with_idle_rows([]), 0, 0.0)
        before = parameters(learner)
        found = update(learner, batch_with_idle_rows(list(range(9))), 1, 0.0).metrics
        after[skip] = parameters(learner)
        assert found["train/updates"] == 1 and found["train/skipped_empty"] == 0
        assert found["grad/norm"] == 0 and "mismatch/abs_max" in found
        assert any(not torch.equal(a, b) for a, b in zip(before, after[skip], strict=True))
    for left, right in zip(after[True], after[False], strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=2e-6)


ADAPTIVE = PluginManager().build(EntropyController, "adaptive")


@pytest.mark.parametrize(
    ("loss", "kl_coef", "options"),
    [
        ("ppo_clip", 0.1, {}),
        ("ppo_clip", 0.0, {"entropy_coef": 0.01}),
        ("ppo_clip", 0.0, {"entropy_controller": ADAPTIVE}),
        ("ppo_clip", 0.0, {"top_entropy": 0.5}),
        ("clip_cov", 0.0, {}),
        ("dro", 0.0, {}),
    ],
)
def test_no_row_is_idle_where_something_else_reads_it(
    model_dir: Path, manager: PluginManager, loss: str, kl_coef: float, options: dict[str, Any]
) -> None:
    learner = make_learner(model_dir, manager, True, loss, **options)
    assert not learner.objective.idle_rows(batch_with_idle_rows(IDLE), kl_coef).any()


def test_no_row_is_idle_where_each_micro_batch_is_divided_by_its_own_counts(
    model_dir: Path, manager: PluginManager
) -> None:
    """TRL's bnpo: a row of advantage 0 still counts among the tokens of its micro-batch."""
    after = {}
    for skip in (False, True):
        learner = make_learner(model_dir, manager, skip)
        local = manager.build(Aggregator, "token-mean", {"counts": "micro", "allow_local": True})
        (term,) = learner.objective.terms
        terms = (replace(term, aggregator=local),)
        learner.objective = replace(learner.objective, terms=terms, aggregator=local)
        update(learner, batch_with_idle_rows(IDLE), 0, 0.0)
        after[skip] = parameters(learner)
    for left, right in zip(after[True], after[False], strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0)
