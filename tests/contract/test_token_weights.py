"""The weights heard during training are autograd's, for every loss and every aggregator.

The references call a loss and an aggregator as a plugin's author would, on the whole mini-batch at
once, and ask autograd for d loss / d log-prob.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.config.sections import OptimizerSection
from posttrain.core.contracts import Aggregator, KlEstimator, PolicyLoss
from posttrain.core.kit.batches import build_batch
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.math.masking import masked
from posttrain.core.plugin_manager import PluginEntry
from posttrain.core.runtime.seeding import generator
from posttrain.core.tracking.metric_names import METRICS, check_names
from posttrain.core.training.columns import ColumnFiller
from posttrain.core.training.learner import Learner
from posttrain.core.training.metrics import MetricSums
from posttrain.core.training.natural_gradient import NaturalGradient
from posttrain.core.training.objective import LossTerm, Objective
from posttrain.core.training.optim import MasterOptimizer
from posttrain.core.training.splitting import mini_rows
from posttrain.core.training.token_weights import HeardWeights, length_thirds, weight_figures
from posttrain.core.training.updates import UpdateResult, UpdateSettings
from tests.contract.test_microscope import LOSSES, fields_of
from tests.helpers.losses import MANAGER, build_aggregator, build_loss, policy_batch
from tests.helpers.rollouts import load_tiny, ragged_batch

STEP = 3
CUTS = {"whole": 99, "micro-batches": 3}
AGGREGATORS = [entry.name for entry in MANAGER.entries("aggregator")]


def autograds(
    loss: PolicyLoss[Any], aggregator: Aggregator[Any], mini: RolloutBatch, at: Tensor
) -> Tensor:
    """d loss / d log-prob [B, T] of a whole mini-batch at the log-probs `at` [B, T]."""
    leaf = at.clone().requires_grad_()
    prepared = None
    if loss.needs_prepare():
        prepared = loss.prepare(mini, generator(0, "prepare", STEP, 0))
    counts = aggregator.count(loss.loss_mask(mini), mini.group_id)
    result = loss.token_loss(leaf, mini, prepared)
    weights = aggregator.weights(loss.loss_mask(mini), counts)
    (found,) = torch.autograd.grad(masked(result.loss * weights, result.mask).sum(), leaf)
    return found


@pytest.mark.parametrize("size", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("aggregator", AGGREGATORS)
@pytest.mark.parametrize("entry", LOSSES)
def test_what_is_heard_is_what_autograd_finds(
    entry: PluginEntry, aggregator: str, size: int
) -> None:
    batch, now = policy_batch(seed=4)
    mini = batch.with_columns(logprobs_now=now)
    loss, plugin = build_loss(entry.name, fields_of(entry)), build_aggregator(aggregator)
    objective = Objective((LossTerm(loss, plugin),), plugin)
    heard, parts = HeardWeights(mini), torch.arange(len(mini)).split(size)
    prepared = objective.prepare(mini, generator(0, "prepare", STEP, 0), len(parts), STEP)
    for rows in parts:
        logprobs = now[rows].clone().requires_grad_()
        micro = mini.select(rows)
        found = objective.loss(logprobs, mini.column("entropy")[rows], micro, prepared.rows(rows))
        heard.listen(found, rows)
        found.total.backward()  # type: ignore[no-untyped-call]
    wanted = autograds(build_loss(entry.name, fields_of(entry)), plugin, mini, now)
    largest = float(wanted.abs().max())
    assert largest > 0
    torch.testing.assert_close(heard.total, wanted, rtol=0, atol=1e-6 * largest)
    sums = MetricSums()
    heard.record(sums)
    assert sums.result()["token_weight/max"] == pytest.approx(largest, rel=1e-6)


# --- in a learner with a model --------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def learner_batch() -> RolloutBatch:
    """Ragged rows, an advantage of 0 among those of both signs."""
    batch = ragged_batch([4, 6, 3, 5], group_size=3)
    advantages = batch.column("advantages").clone()
    advantages[:] = masked(advantages[:, :1].expand_as(advantages), batch.mask)
    advantages[4] = 0
    draw = torch.Generator().manual_seed(1)
    engine = -4.5 + 0.3 * torch.randn(batch.mask.shape, generator=draw)
    return batch.with_columns(
        advantages=advantages.float(),
        rollout_logprobs=engine,
        acc=(torch.arange(len(batch)) % 2).float(),
    )


def heard_in_learner(
    monkeypatch: pytest.MonkeyPatch,
    model_dir: Path,
    objective: Objective,
    settings: UpdateSettings,
    kl_coef: float = 0.0,
) -> tuple[RolloutBatch, UpdateResult, list[HeardWeights]]:
    """An update of a real learner, and what each of its optimizer steps heard."""
    found: list[HeardWeights] = []
    record = HeardWeights.record

    def kept(self: HeardWeights, *arguments: Any) -> None:
        record(self, *arguments)
        found.append(self)

    monkeypatch.setattr(HeardWeights, "record", kept)
    model, section = load_tiny(model_dir, torch.float32), OptimizerSection(learning_rate=2e-5)
    region = None
    if objective.owns_update:
        region = NaturalGradient(model, objective.terms[0].loss.config, 1.0, 4)
    learner = Learner(
        model,
        MasterOptimizer(model, section, 8),
        objective,
        settings,
        load_tiny(model_dir, torch.float32),
        trust_region=region,
    )
    batch = ColumnFiller(learner).fill_for_update(learner_batch(), STEP, kl_coef).batch
    result = learner.update(batch, STEP, kl_coef)
    check_names(result.metrics)
    return batch.with_columns(old_logprobs=result.old_logprobs), result, found


def is_stateless(loss: PolicyLoss[Any]) -> bool:
    """Whether a second instance has the weights of one that has trained; of all others the test
    above and test_microscope.py judge."""
    own = loss.needs_prepare() or loss.name in ("bapo", "ppo_penalty")
    return not own and "teacher_logprobs" not in loss.required_columns()


LEARNED = [given for given in LOSSES if is_stateless(build_loss(given.values[0].name))]


@pytest.mark.parametrize("entry", LEARNED)
def test_a_learner_hears_autograds_weights(
    entry: PluginEntry, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two epochs of two mini-batches in micro-batches; the last optimizer step is compared."""
    place = [given.values[0].name for given in LEARNED].index(entry.name)
    plugin = build_aggregator(AGGREGATORS[place % len(AGGREGATORS)])
    objective = Objective((LossTerm(build_loss(entry.name, fields_of(entry)), plugin),), plugin)
    count = 1 if objective.owns_update else 2  # evidence has a trust region's first policy alone
    settings = UpdateSettings(count, count, 4, 1.0, 5, skip_idle_rows=False)
    batch, result, heard = heard_in_learner(monkeypatch, model_dir, objective, settings)
    assert len(heard) == count * count
    number = len(heard) - 1
    rows = list(mini_rows(batch, count, count, 5, "mini_batches", STEP))[number]
    at = result.seen.logprobs[rows]
    mini = batch.select(rows).with_columns(logprobs_now=at, entropy=result.seen.entropy[rows])
    loss = build_loss(entry.name, fields_of(entry))
    wanted = autograds(loss, plugin, mini, at)
    largest = float(wanted.abs().max())
    assert largest > 0
    torch.testing.assert_close(heard[number].total, wanted, rtol=0, atol=1e-6 * largest)
    assert result.metrics["token_weight/max"] >= largest * (1 - 1e-6)


def test_the_kl_term_is_in_the_weights_and_ranks_and_switches_are_obeyed(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = build_aggregator("token-mean")
    term = LossTerm(build_loss("ppo_clip"), plugin)
    kl = MANAGER.build(KlEstimator, "k2")
    objective = Objective((term,), plugin, kl=kl)
    one = UpdateSettings(1, 2, 4, 1.0, 5)
    batch, result, heard = heard_in_learner(monkeypatch, model_dir, objective, one, kl_coef=0.5)
    rows = list(mini_rows(batch, 1, 2, 5, "mini_batches", STEP))[1]
    at, mini = result.seen.logprobs[rows], batch.select(rows)
    policy = autograds(term.loss, plugin, mini, at)
    count = mini.mask.sum()
    pull = masked(0.5 * (at - mini.column("ref_logprobs")) / count, mini.mask)
    assert pull.abs().max() > 1e-5
    torch.testing.assert_close(heard[1].total, policy + pull, rtol=0, atol=1e-7)
    off = UpdateSettings(1, 2, 4, 1.0, 5, token_weights=False)
    _, silent, none = heard_in_learner(monkeypatch, model_dir, objective, off, kl_coef=0.5)
    assert not none and not [n for n in silent.metrics if n.startswith("token_weight/")]
    assert silent.metrics["loss/total"] == result.metrics["loss/total"]
    assert torch.equal(silent.seen.logprobs, result.seen.logprobs)


# --- the figures ----------------------------------------------------------------------------------


def test_figures_by_hand() -> None:
    """Rows of 1, 2 and 4 tokens whose tokens weigh 4, 2 and 1: each twice as long has half."""
    mask = (torch.arange(4)[None, :] < torch.tensor([1, 2, 4])[:, None]).double()
    size = torch.tensor([[4.0], [-2.0], [1.0]], dtype=torch.float64) * mask
    advantages = torch.tensor([[-1.0], [1.0], [0.0]]).expand(3, 4) * mask
    batch = build_batch(mask, advantages=advantages)
    bounded = torch.zeros(3, 4)
    bounded[1, 0] = 1
    found = weight_figures(size, bounded, batch)
    assert found == {
        "token_weight/max": 4.0,
        "token_weight/p99": 4.0,
        "token_weight/p50": 1.0,
        "token_weight/peak": pytest.approx(4 * 7 / 12),
        "token_weight/zero_frac": 0.0,
        "token_weight/effective": pytest.approx(144 / 28),
        "token_weight/effective_frac": pytest.approx(144 / 28 / 7),
        "token_weight/length_slope": pytest.approx(-1.0),
        "token_weight/share/positive": pytest.approx(4 / 12),
        "token_weight/share/negative": pytest.approx(4 / 12),
        "token_weight/share/bounded": pytest.approx(2 / 12),
        "token_weight/share/short": pytest.approx(4 / 12),
        "token_weight/share/medium": pytest.approx(4 / 12),
        "token_weight/share/long": pytest.approx(4 / 12),
        # the only token of a row is early; of two the second is in the middle; of four 2, 1, 1
        "token_weight/share/early": pytest.approx((4 + 2 + 2) / 12),
        "token_weight/share/middle": pytest.approx((2 + 1) / 12),
        "token_weight/share/late": pytest.approx(1 / 12),
    }
    assert set(found) == {name for name in METRICS if name.startswith("token_weight/")}


def test_what_does_not_exist_is_left_out() -> None:
    nothing = build_batch(torch.zeros(2, 3), advantages=torch.zeros(2, 3))
    assert weight_figures(torch.ones(2, 3), torch.zeros(2, 3), nothing) == {}
    idle = build_batch(torch.ones(2, 3), advantages=torch.zeros(2, 3))
    found = weight_figures(torch.zeros(2, 3), torch.zeros(2, 3), idle)
    assert found == {"token_weight/zero_frac": 1.0}
    assert "token_weight/length_slope" not in weight_figures(
        torch.ones(2, 3), torch.zeros(2, 3), idle
    )


def test_thirds_are_of_the_range_of_lengths() -> None:
    lengths = torch.tensor([5, 0, 1, 1, 3, 10, 7, 6])
    tokens = torch.arange(10)[None, :] < lengths[:, None]
    assert length_thirds(tokens).tolist() == [1, -1, 0, 0, 0, 2, 2, 1]
    assert length_thirds(torch.zeros(2, 3).bool()).tolist() == [-1, -1]
    assert length_thirds(torch.ones(4, 3).bool()).tolist() == [1, 1, 1, 1]
