"""TRPO's step: its direction on a softmax bandit, and what it promises on a tiny Llama.

Over 300 lines because the bandit, whose answer is known in closed form, is written out here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import Aggregator, PolicyLoss
from posttrain.core.errors import ConfigError, RunError
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.runtime.seeding import generator
from posttrain.core.training.exact_kl import kl_to_policy
from posttrain.core.training.forward import response_logprobs
from posttrain.core.training.natural_gradient import NaturalGradient, TrustRegion
from posttrain.core.training.objective import LossTerm, Objective
from tests.helpers.rollouts import load_tiny, ragged_batch, sequence

TEMPERATURE = 0.9


@dataclass(frozen=True)
class Region:
    """Settings beyond what the plugin's config allows."""

    delta: float = 0.01
    damping: float = 0.1
    cg_iters: int = 10
    max_backtracks: int = 10
    backtrack_ratio: float = 0.8
    accept_ratio: float = 0.0
    fvp_token_fraction: float = 1.0


FAR = Region(delta=2.0, damping=1e-3, cg_iters=30, fvp_token_fraction=0.1, max_backtracks=30)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), init_std=0.15)


def make_objective(
    manager: PluginManager, aggregator: str = "token-mean", entropy_coef: float = 0.0
) -> Objective:
    mean = manager.build(Aggregator, aggregator)
    term = LossTerm(manager.build(PolicyLoss, "trpo"), mean)
    return Objective(terms=(term,), aggregator=mean, entropy_coef=entropy_coef)


def with_old(model: PreTrainedModel, batch: RolloutBatch) -> RolloutBatch:
    with torch.no_grad():
        old = response_logprobs(model, batch, temperature=TEMPERATURE)
    return batch.with_columns(old_logprobs=old.logprobs, entropy=old.entropy)


def take_step(
    model: PreTrainedModel,
    batch: RolloutBatch,
    objective: Objective,
    region: TrustRegion,
    *,
    micro: int = 4,
    seed: int = 0,
    check: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """One step on `batch` from the policy that sampled it."""
    mini = with_old(model, batch)
    prepared = objective.prepare(mini, generator(seed), -(-len(mini) // micro))
    taken = NaturalGradient(model, region, TEMPERATURE, micro, check)
    return taken.step(mini, objective, prepared, generator(seed))


def weights_of(model: PreTrainedModel) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same_bits(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def measured_kl(
    old: PreTrainedModel, new: PreTrainedModel, batch: RolloutBatch, weights: Tensor
) -> float:
    """Weighted KL(old || new) from all logits, each sequence computed alone."""
    total = 0.0
    for row in range(len(batch)):
        prompt, response = sequence(batch, row)
        with torch.no_grad():
            before, after = (
                m(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
                for m in (old, new)
            )
        kl = kl_to_policy(after.double(), before.double())
        total += float((weights[row, : len(kl)] * kl).sum())
    return total


def test_on_a_softmax_bandit_the_step_solves_fisher_plus_damping(
    tmp_path: Path, manager: PluginManager
) -> None:
    """One prompt, one token, only the head trained: F = (diag p - p p') x h h' in closed form."""
    folder = make_tiny_model(tmp_path, layers=1, hidden=8, tied=False, init_std=0.3)
    model = load_tiny(folder)
    for name, param in model.named_parameters():
        param.requires_grad_(name == "lm_head.weight")
    batch = ragged_batch([4], group_size=24, seed=1)
    first = torch.zeros_like(batch.mask)
    first[:, 0] = 1
    draw = torch.Generator().manual_seed(0)
    advantages = first * torch.randn(24, 1, generator=draw, dtype=torch.float64)
    batch = batch.with_columns(response_mask=first, mask=first, advantages=advantages)

    head = model.get_output_embeddings().weight  # type: ignore[no-untyped-call]
    prompt, _ = sequence(batch, 0)
    with torch.no_grad():
        h = model.base_model(prompt[None]).last_hidden_state[0, -1] / TEMPERATURE
        p = torch.softmax(head @ h, dim=-1)
    actions = torch.nn.functional.one_hot(batch.response_ids[:, 0], len(p)).double()
    gradient = torch.outer((advantages[:, :1] * (actions - p)).mean(dim=0), h).flatten()
    fisher = torch.kron(torch.diag(p) - p[:, None] * p, torch.outer(h, h))
    damped = fisher + 0.1 * torch.eye(len(gradient), dtype=torch.float64)
    x = torch.linalg.solve(damped, gradient)
    full = x * (2 * 0.01 / (x @ damped @ x + 1e-8)).sqrt()

    before = head.detach().clone()
    metrics = take_step(model, batch, make_objective(manager), Region(cg_iters=100))
    assert metrics["trpo/rejected"] == 0 and metrics["trpo/cg_residual"] < 1e-3
    moved = (head.detach() - before).flatten()
    wanted = metrics["trpo/step_fraction"] * full
    assert float((moved - wanted).norm() / wanted.norm()) < 1e-4
    assert metrics["trpo/expected"] == pytest.approx(float(gradient @ wanted), rel=1e-4)
    assert metrics["grad/norm"] == pytest.approx(float(gradient.norm()), rel=1e-4)


@pytest.mark.parametrize(
    "aggregator", ["token-mean", pytest.param("seq-mean-token-mean", marks=pytest.mark.slow)]
)
def test_consecutive_steps_stay_in_the_region_and_improve_the_surrogate(
    model_dir: Path, manager: PluginManager, aggregator: str
) -> None:
    model = load_tiny(model_dir, torch.float32)
    objective = make_objective(manager, aggregator)
    region = manager.build(
        PolicyLoss, "trpo", {"delta": 0.005, "accept_ratio": 0.1, "fvp_token_fraction": 0.25}
    ).config
    for step in range(3):
        batch = ragged_batch([5, 9, 3, 4], group_size=3, seed=step)
        old = copy.deepcopy(model)
        metrics = take_step(model, batch, objective, region, seed=step)
        assert metrics["trpo/rejected"] == metrics["trpo/skipped"] == 0
        assert 0 < metrics["trpo/kl"] <= 0.005
        weights = objective.aggregator.weights(batch.mask, objective.aggregator.count(batch.mask))
        assert measured_kl(old, model, batch, weights) == pytest.approx(
            metrics["trpo/kl"], rel=1e-2
        )
        surrogates = []
        for policy in (old, model):
            found = with_old(old, batch)
            with torch.no_grad():
                new = response_logprobs(policy, batch, temperature=TEMPERATURE).logprobs
            ratio = (new - found.column("old_logprobs")).exp()
            surrogates.append(float((weights * ratio * batch.column("advantages")).sum()))
        gain = surrogates[1] - surrogates[0]
        assert gain > 0
        assert metrics["trpo/improvement"] == pytest.approx(gain, rel=1e-3)
        assert gain >= 0.1 * metrics["trpo/expected"]
        assert metrics["trpo/step_fraction"] == pytest.approx(0.8 ** metrics["trpo/backtracks"])


def test_a_step_that_is_too_long_is_shortened(model_dir: Path, manager: PluginManager) -> None:
    """Far from the weights the quadratic is wrong: the measured KL decides."""
    batch = ragged_batch([5, 9, 3, 4], group_size=3)
    model = load_tiny(model_dir, torch.float32)
    old = copy.deepcopy(model)
    metrics = take_step(model, batch, make_objective(manager), FAR)
    assert metrics["trpo/backtracks"] > 0 == metrics["trpo/rejected"]
    kl = measured_kl(old, model, batch, batch.mask.double() / batch.mask.sum())
    assert kl <= 2.0 * (1 + 1e-5)


@pytest.mark.parametrize(
    "region",
    [Region(accept_ratio=1e6), replace(FAR, max_backtracks=0)],
    ids=["too little improvement", "too far"],
)
def test_a_rejected_step_restores_the_weights_bit_for_bit(
    model_dir: Path, manager: PluginManager, region: Region
) -> None:
    model = load_tiny(model_dir, torch.float32)
    before = weights_of(model)
    batch = ragged_batch([5, 9, 3, 4], group_size=3)
    metrics = take_step(model, batch, make_objective(manager), region)
    assert metrics["trpo/rejected"] == 1.0
    assert metrics["trpo/backtracks"] == region.max_backtracks
    assert metrics["trpo/kl"] == metrics["trpo/improvement"] == metrics["trpo/step_fraction"] == 0
    assert same_bits(before, weights_of(model))
    assert all(p.grad is None for p in model.parameters())


def test_a_stop_at_any_moment_leaves_the_weights_as_they_were(
    model_dir: Path, manager: PluginManager
) -> None:
    model = load_tiny(model_dir, torch.float32)
    before = weights_of(model)
    batch = ragged_batch([5, 3], group_size=2)
    region = Region(cg_iters=2, accept_ratio=1e6, max_backtracks=1)
    passes = 0

    def count() -> None:
        nonlocal passes
        passes += 1

    take_step(model, batch, make_objective(manager), region, micro=2, check=count)
    assert passes == 2 + 2 * 2 + 2 * 2  # gradient, two products, two candidates, in two parts
    for stop_at in range(1, passes + 1):
        left = stop_at

        def stop() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise InterruptedError

        with pytest.raises(InterruptedError):
            take_step(model, batch, make_objective(manager), region, micro=2, check=stop)
        assert same_bits(before, weights_of(model))


@pytest.mark.parametrize("empty", ["advantages", "mask"])
def test_nothing_to_gain_moves_nothing(model_dir: Path, manager: PluginManager, empty: str) -> None:
    model = load_tiny(model_dir, torch.float32)
    before = weights_of(model)
    batch = ragged_batch([5, 3], group_size=2)
    batch = batch.with_columns(**{empty: torch.zeros_like(batch.column(empty))})
    metrics = take_step(model, batch, make_objective(manager), Region())
    assert metrics["trpo/skipped"] == 1.0 and metrics["trpo/rejected"] == 0.0
    assert metrics["grad/norm"] == 0.0
    assert same_bits(before, weights_of(model))
    # An entropy bonus is a gain of its own.
    if empty == "advantages":
        bonus = make_objective(manager, entropy_coef=1.0)
        assert take_step(model, batch, bonus, Region())["trpo/improvement"] > 0


@pytest.mark.parametrize("fraction", [pytest.param(1.0, marks=pytest.mark.slow), 0.3])
def test_micro_batches_of_any_size_take_the_same_step(
    model_dir: Path, manager: PluginManager, fraction: float
) -> None:
    batch = ragged_batch([5, 9, 3, 4], group_size=3)
    region = Region(fvp_token_fraction=fraction)
    moves = []
    for micro in (12, 5, 1):
        model = load_tiny(model_dir)
        before = torch.cat([w.flatten() for w in weights_of(model)])
        metrics = take_step(
            model, batch, make_objective(manager, "seq-mean-token-mean"), region, micro=micro
        )
        assert metrics["trpo/rejected"] == 0
        moves.append(torch.cat([w.flatten() for w in weights_of(model)]) - before)
    for other in moves[1:]:
        # Conjugate gradients magnify the rounding of the float32 norms inside the model.
        assert float((other - moves[0]).norm() / moves[0].norm()) < 1e-3


def test_the_generator_decides_which_tokens_make_the_fisher_matrix(
    model_dir: Path, manager: PluginManager
) -> None:
    batch = ragged_batch([5, 9, 3, 4], group_size=3)
    residuals = [
        take_step(
            load_tiny(model_dir, torch.float32),
            batch,
            make_objective(manager),
            Region(fvp_token_fraction=0.1, cg_iters=3),
            seed=seed,
        )["trpo/cg_residual"]
        for seed in (0, 0, 1)
    ]
    assert residuals[0] == residuals[1] != residuals[2]


def test_the_record_is_of_the_policy_before_the_step(
    model_dir: Path, manager: PluginManager
) -> None:
    model = load_tiny(model_dir, torch.float32)
    mini = with_old(model, ragged_batch([5, 3], group_size=2))
    objective = make_objective(manager)
    seen: list[tuple[float, Tensor, int]] = []
    metrics = NaturalGradient(model, Region(), TEMPERATURE, 3).step(
        mini,
        objective,
        objective.prepare(mini, generator(0), 2),
        generator(0),
        record=lambda loss, out, micro, rows: seen.append(
            (float(loss.total.detach()), out.logprobs.detach(), len(micro))
        ),
    )
    assert metrics["trpo/rejected"] == 0.0
    assert [count for _, _, count in seen] == [3, 1]
    expected = -float((mini.column("advantages") * mini.mask).sum() / mini.mask.sum())
    assert sum(loss for loss, _, _ in seen) == pytest.approx(expected, rel=1e-5)
    logprobs = torch.cat([found for _, found, _ in seen])
    torch.testing.assert_close(logprobs, mini.column("old_logprobs"), rtol=0, atol=1e-5)


def test_low_precision_and_missing_columns_are_refused(
    model_dir: Path, manager: PluginManager
) -> None:
    with pytest.raises(ConfigError, match="'trpo'.*bfloat16.*model.dtype to float32"):
        NaturalGradient(load_tiny(model_dir, torch.bfloat16), Region(), 1.0, 4)
    batch = ragged_batch([3], group_size=2)
    objective = make_objective(manager)
    prepared = objective.prepare(batch, generator(0))
    taken = NaturalGradient(load_tiny(model_dir, torch.float32), Region(), 1.0, 4)
    with pytest.raises(RunError, match="the trust region needs.*old_logprobs"):
        taken.step(batch, objective, prepared, generator(0))
