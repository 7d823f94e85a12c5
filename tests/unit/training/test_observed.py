"""The term `echo`: cross entropy on what the environment wrote, next to the policy's own terms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.core.batch import RolloutBatch
from posttrain.core.config.sections import OptimizerSection
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.training.learner import Learner
from posttrain.core.training.metrics import MetricSums
from posttrain.core.training.objective import LossTerm, Objective
from posttrain.core.training.optim import MasterOptimizer
from posttrain.core.training.ranks import ALONE, Ranks
from posttrain.core.training.updates import UpdateSettings
from tests.helpers.losses import build_aggregator, build_loss, objective_of, policy_batch
from tests.helpers.rollouts import assert_same_gradient, gradient_of, load_tiny, ragged_batch
from tests.helpers.updates import update

ALPHA = 0.1
# Which tokens of each row are an observation's: in the middle, at the end, everything but the first
# one, none. Row 1 takes no loss, as a failed episode does.
OBSERVED = {1: slice(1, 3), 2: slice(5, 7), 3: slice(1, 3), 5: slice(0, 1)}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def observed_batch() -> RolloutBatch:
    batch = ragged_batch([5, 4], group_size=3)
    real, observed = batch.response_mask.clone(), torch.zeros_like(batch.response_mask)
    for row, place in OBSERVED.items():
        observed[row, place] = real[row, place]
    assert observed.sum() > 5
    kept = 1 - observed
    return replace(
        batch,
        response_mask=real * kept,
        mask=batch.mask * kept,
        obs_mask=observed,
    )


def echo(coef: float = 1.0, aggregator: str = "token-mean", **fields: object) -> LossTerm:
    return LossTerm(build_loss("echo", fields), build_aggregator(aggregator), coef)


def make_learner(
    model: PreTrainedModel,
    observed: LossTerm | None,
    *,
    policy: float = 1.0,
    micro: int = 6,
    temperature: float = 1.0,
    ranks: Ranks = ALONE,
) -> Learner:
    mean = build_aggregator("token-mean")
    term = LossTerm(build_loss("ppo_clip"), mean, policy)
    return Learner(
        model,
        MasterOptimizer(model, OptimizerSection(learning_rate=1e-3, max_grad_norm=None), 100),
        Objective((term,), mean, observed=observed),
        UpdateSettings(1, 1, micro, temperature=temperature, seed=0),
        ranks=ranks,
    )


def gradients(folder: Path, batch: RolloutBatch, *args: Any, **options: Any) -> list[Tensor]:
    """What one update makes of `batch`, before its optimizer step."""
    model = load_tiny(folder)
    learner = make_learner(model, *args, **options)
    learner.optimizer.close()
    found: list[Tensor] = []

    def keep(rate_factor: float = 1.0, **of_loss: object) -> Any:
        found.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)
        raise StopIteration

    learner.optimizer.step = keep  # type: ignore[method-assign]
    with pytest.raises(StopIteration):
        update(learner, batch, 1, 0.0)
    return found


def by_hand(folder: Path, batch: RolloutBatch) -> tuple[list[Tensor], float]:
    """The gradient of the term, row by row on whole sequences, and its value."""
    model, observed = load_tiny(folder), batch.obs_mask
    assert observed is not None
    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(batch)):
        prompt = batch.prompt_ids[row][batch.prompt_mask[row].bool()]
        ids = torch.cat([prompt, batch.response_ids[row]])
        logits = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1].double()
        chosen = logits.log_softmax(-1).gather(1, batch.response_ids[row][:, None])[:, 0]
        total = total - ALPHA * (chosen * observed[row]).sum() / observed.sum()
    total.backward()  # type: ignore[no-untyped-call]
    return gradient_of(model), float(total)


def test_one_observed_token_by_hand() -> None:
    """p = 0.25 and alpha = 0.1: value 0.138629 / N, slope -0.1 / N."""
    batch, new = policy_batch(seed=1)
    observed = torch.zeros_like(batch.mask)
    observed[3, 1] = observed[4, 1] = 1
    batch = batch.with_columns(obs_mask=observed)
    objective = objective_of(build_loss("ppo_clip"), observed=echo())
    prepared = objective.prepare(batch, torch.Generator())
    logprobs = torch.full_like(new, math.log(0.25)).requires_grad_()
    entropy = torch.zeros_like(new)
    found = objective.loss(new, entropy, batch, prepared, observed=logprobs)
    assert float(found.parts["loss/term/echo"]) == pytest.approx(0.138629, abs=1e-6)
    plain = objective_of(build_loss("ppo_clip")).loss(new, entropy, batch, prepared)
    assert float((found.total - plain.total).detach()) == pytest.approx(0.138629, abs=1e-6)
    assert found.parts["loss/policy"] == plain.parts["loss/policy"]
    (slope,) = torch.autograd.grad(found.total, logprobs)
    assert slope[3, 1] == slope[4, 1] == pytest.approx(-0.1 / 2)
    assert slope.count_nonzero() == 2


@pytest.mark.parametrize("aggregator", ["token-mean", "seq-mean-token-mean", "prompt-mean"])
def test_its_counts_are_its_own_in_any_cut(aggregator: str) -> None:
    batch, new = policy_batch(seed=2)
    observed = torch.zeros_like(batch.mask)
    observed[:, 1] = (batch.mask[:, 2] > 0).double()
    batch = batch.with_columns(obs_mask=observed)
    term = echo(aggregator=aggregator)
    objective = objective_of(build_loss("ppo_clip"), observed=term)
    prepared = objective.prepare(batch, torch.Generator())

    def value(rows: Sequence[int]) -> float:
        index = torch.tensor(rows)
        micro, part = batch.select(index), prepared.rows(index)
        found = objective.loss(
            new[index], torch.zeros_like(new[index]), micro, part, observed=new[index]
        )
        return float(found.parts["loss/term/echo"])

    whole = value(range(8))
    assert whole > 0
    assert value([7, 0]) + value([3, 6, 1]) + value([5, 2, 4]) == pytest.approx(whole, rel=1e-9)


def test_the_gradient_is_that_of_whole_sequences(model_dir: Path) -> None:
    batch = observed_batch()
    wanted, value = by_hand(model_dir, batch)
    found = gradients(model_dir, batch, echo(), policy=0.0, temperature=0.7)
    assert_same_gradient(found, wanted, tolerance=2e-5)
    metrics = update(make_learner(load_tiny(model_dir), echo()), batch, 1, 0.0).metrics
    assert metrics["loss/term/echo"] == pytest.approx(value, rel=1e-5)
    assert metrics["observed/nll"] == pytest.approx(value / ALPHA, rel=1e-5)


def test_it_adds_to_the_policys_gradient_however_the_batch_is_cut(model_dir: Path) -> None:
    batch, temperature = observed_batch(), 0.7
    options: dict[str, Any] = {"temperature": temperature}
    both = gradients(model_dir, batch, echo(2.0), **options)
    assert_same_gradient(gradients(model_dir, batch, echo(2.0), micro=1, **options), both)
    alone = gradients(model_dir, batch, None, **options)
    term = gradients(model_dir, batch, echo(2.0), policy=0.0, **options)
    assert_same_gradient([a + b for a, b in zip(alone, term, strict=True)], both)


class OneOf:
    """One of two ranks, whose sums somebody else takes."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def share(self, parts: Sequence[Any]) -> list[tuple[Any, bool]]:
        return [(part, True) for part in parts[self.rank :: 2]]

    def add(self, values: Tensor) -> Tensor:
        return values

    def merge(self, sums: MetricSums) -> MetricSums:
        return sums


def test_two_ranks_add_up_to_one(model_dir: Path) -> None:
    batch = observed_batch()
    whole = gradients(model_dir, batch, echo())
    parts = [gradients(model_dir, batch, echo(), micro=1, ranks=OneOf(rank)) for rank in (0, 1)]
    assert_same_gradient([a + b for a, b in zip(*parts, strict=True)], whole)


def test_rows_without_an_advantage_are_learned_from(model_dir: Path) -> None:
    batch = observed_batch()
    nothing = batch.with_columns(advantages=torch.zeros_like(batch.column("advantages")))
    wanted, _ = by_hand(model_dir, batch)
    assert_same_gradient(gradients(model_dir, nothing, echo()), wanted, tolerance=2e-5)


def test_without_the_term_observations_change_nothing(model_dir: Path) -> None:
    """They are not evaluated either: a row's pass ends with its last sampled token."""
    batch = observed_batch()
    plain = gradients(model_dir, replace(batch, obs_mask=None), None)
    for a, b in zip(gradients(model_dir, batch, None), plain, strict=True):
        assert torch.equal(a, b)
    objective = make_learner(load_tiny(model_dir), None).objective
    assert not objective.reads_observed(batch)
    assert not replace(objective, observed=echo()).reads_observed(replace(batch, obs_mask=None))
