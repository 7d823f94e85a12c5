"""Trainer and engine are compared under the distribution sampled from, in every kind of update."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.core.batch import RolloutBatch
from posttrain.core.config.sections import OptimizerSection
from posttrain.core.contracts import Aggregator, PolicyLoss, RolloutCorrection
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.math.correction import mismatch_metrics
from posttrain.core.math.nucleus import Cut, log_kept_mass
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.rollout.sampling import draw_tokens
from posttrain.core.training.columns import ColumnFiller
from posttrain.core.training.forward import response_logprobs
from posttrain.core.training.learner import Learner
from posttrain.core.training.logprobs import cut_logprobs
from posttrain.core.training.objective import LossTerm, Objective
from posttrain.core.training.optim import MasterOptimizer
from posttrain.core.training.updates import UpdateSettings
from posttrain.core.types import SamplingParams
from tests.helpers.rollouts import assert_same_gradient, gradient_of, load_tiny, ragged_batch
from tests.helpers.updates import update, with_old_logprobs

CUTS = [Cut(0, 0.8), Cut(20, 1.0), Cut(20, 0.8), Cut(1, 1.0)]
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), init_std=0.2)


def kept_by_sorting(probabilities: list[float], target: int, cut: Cut) -> float:
    """The probability that a cut keeps, by its definition."""
    order = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])
    order = order[: cut.top_k or None]
    total, kept, support = sum(probabilities[i] for i in order), 0.0, set()
    for index in order:
        if kept / total >= cut.top_p:
            break
        support.add(index)
        kept += probabilities[index]
    return kept if target in support else kept + probabilities[target]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_the_kept_mass_is_that_of_the_definition_with_the_sampled_token_in_it(cut: Cut) -> None:
    generator = torch.Generator().manual_seed(0)
    logp = (3 * torch.randn(150, 40, generator=generator, dtype=torch.float64)).log_softmax(-1)
    targets = torch.randint(40, (150,), generator=generator)  # many lie beyond the cut
    found = log_kept_mass(logp, targets, cut).exp().tolist()
    pairs = zip(logp.exp().tolist(), targets.tolist(), strict=True)
    assert found == pytest.approx([kept_by_sorting(row, target, cut) for row, target in pairs])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_what_an_engine_draws_has_the_same_log_prob_here(cut: Cut, dtype: torch.dtype) -> None:
    """In bfloat16 many logits are equal, and which of them top-k keeps is arbitrary."""
    generator = torch.Generator().manual_seed(1)
    logits = (4 * torch.randn(300, 400, generator=generator)).to(dtype)
    params = SamplingParams(temperature=TEMPERATURE, top_k=cut.top_k, top_p=cut.top_p)
    uniforms = torch.rand(300, generator=generator, dtype=torch.float64)
    ids, drawn = draw_tokens(logits, uniforms, params)
    identity = torch.eye(400, dtype=dtype)
    values, _, kept = cut_logprobs(logits, identity, ids, cut, temperature=TEMPERATURE, chunk=128)
    torch.testing.assert_close(values - kept, drawn, rtol=0, atol=3e-6)
    assert (kept <= 1e-6).all() and kept.min() < -0.01


def engine_said(model: PreTrainedModel, batch: RolloutBatch, cut: Cut, off: float = 0) -> Tensor:
    """Renormalised log-probs, as an engine gives them, `off` nats too high."""
    with torch.no_grad():
        out = response_logprobs(model, batch, temperature=TEMPERATURE, cut=cut)
    kept = 0 if out.log_kept is None else out.log_kept
    return (out.logprobs - kept + off).float() * batch.response_mask


def make_learner(
    model: PreTrainedModel, manager: PluginManager, cut: Cut, updates: int = 1, **objective: Any
) -> Learner:
    mean = manager.build(Aggregator, "token-mean")
    term = LossTerm(manager.build(PolicyLoss, "ppo_clip", {}), mean, 1.0)
    settings = UpdateSettings(updates, 1, 4, temperature=TEMPERATURE, seed=0, cut=cut)
    optimizer = MasterOptimizer(model, OptimizerSection(learning_rate=1e-3), 100)
    return Learner(model, optimizer, Objective((term,), mean, **objective), settings)


def rollout(model: PreTrainedModel, cut: Cut, off: float = 0.0) -> RolloutBatch:
    batch = ragged_batch([5, 3], group_size=3)
    return batch.with_columns(rollout_logprobs=engine_said(model, batch, cut, off))


@pytest.mark.parametrize("cut", [Cut(), Cut(20, 0.8)], ids=["untruncated", "truncated"])
@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("correction", [None, "tis_token"])
@pytest.mark.parametrize("off", [0.0, 0.1])
def test_every_update_measures_the_mismatch_of_the_sampled_distribution(
    model_dir: Path,
    manager: PluginManager,
    cut: Cut,
    updates: int,
    correction: str | None,
    off: float,
) -> None:
    model = load_tiny(model_dir)
    batch = rollout(model, cut, off)
    chosen = {"correction": manager.build(RolloutCorrection, correction)} if correction else {}
    found = update(make_learner(model, manager, cut, updates, **chosen), batch, 1, 0.0).metrics
    engine = batch.rollout_logprobs
    expected = mismatch_metrics(engine - off * batch.mask, engine, batch.mask)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=2e-6), name
    assert found["mismatch/abs_mean"] == pytest.approx(off, abs=1e-6)


def test_steps_without_an_update_of_their_own_are_measured_too(
    model_dir: Path, manager: PluginManager
) -> None:
    model, cut = load_tiny(model_dir), Cut(20, 0.8)
    batch = rollout(model, cut, off=0.1)
    learner = make_learner(model, manager, cut)
    assert ColumnFiller(learner).mismatch(batch)["mismatch/abs_mean"] == pytest.approx(
        0.1, abs=1e-6
    )
    nothing = batch.with_columns(mask=torch.zeros_like(batch.mask))
    found = update(learner, nothing, 1, 0.0).metrics
    assert found["mismatch/abs_mean"] == pytest.approx(0.1, abs=1e-6)


@pytest.mark.parametrize("correction", [None, "tis_token"])
def test_taking_the_engine_for_the_old_policy_hides_no_mismatch(
    model_dir: Path, manager: PluginManager, correction: str | None
) -> None:
    model = load_tiny(model_dir)
    batch = rollout(model, Cut(), off=0.1)
    chosen = {"correction": manager.build(RolloutCorrection, correction)} if correction else {}
    learner = make_learner(model, manager, Cut(), updates=2, bypass_old=True, **chosen)
    found = update(learner, batch, 1, 0.0).metrics
    assert found["mismatch/abs_mean"] == pytest.approx(0.1, abs=1e-6)


@pytest.mark.parametrize("updates", [1, 2])
def test_the_policy_loss_is_of_the_untruncated_distribution(
    model_dir: Path, manager: PluginManager, updates: int
) -> None:
    """Ratios start at 1 and gradients are those of an engine that cut nothing."""
    gradients = []
    for cut in (Cut(), Cut(20, 0.8)):
        model = load_tiny(model_dir)
        batch = rollout(model, cut)
        learner = make_learner(model, manager, cut, updates)
        learner.optimizer.zero_grad = lambda: None  # type: ignore[method-assign]
        metrics = update(learner, batch, 1, 0.0).metrics
        if updates == 1:
            assert metrics["ratio/max"] == metrics["ratio/min"] == 1
        gradients.append(gradient_of(model) or [p.detach() for p in model.parameters()])
    assert_same_gradient(*gradients)


def test_engine_log_probs_are_corrected_for_truncation_once(
    model_dir: Path, manager: PluginManager
) -> None:
    model, cut = load_tiny(model_dir), Cut(20, 0.8)
    batch = rollout(model, cut)
    learner = make_learner(model, manager, cut)
    once = with_old_logprobs(learner, batch)
    gap = (once.rollout_logprobs - once.column("old_logprobs")) * batch.mask
    assert gap.abs().max() < 1e-6
    assert (once.rollout_logprobs - batch.rollout_logprobs).abs().max() > 0.01
    assert with_old_logprobs(learner, once) is once
    again = with_old_logprobs(learner, replace(once, old_logprobs=None))
    torch.testing.assert_close(again.rollout_logprobs, once.rollout_logprobs)


def test_nothing_is_cut_and_nothing_is_spent_without_top_k_and_top_p(
    model_dir: Path, manager: PluginManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> Tensor:
        raise AssertionError("cut without a cut")

    monkeypatch.setattr("posttrain.core.training.logprobs.log_kept_mass", refuse)
    model = load_tiny(model_dir)
    found = with_old_logprobs(make_learner(model, manager, Cut(), 2), rollout(model, Cut()))
    assert found.log_kept is None
