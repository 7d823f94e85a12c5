"""The microscope's weight of a token is d loss / d logprob, for every loss and every aggregator.

The references do not go through the microscope or the objective: here a loss and an aggregator are
called as a plugin's author would, micro-batch by micro-batch, or finite differences are taken; and
a real learner on a real model tells the gradients that arrived at its log-probs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from posttrain.core.analysis.evidence import StepEvidence
from posttrain.core.analysis.token_weights import CLIP_STATES, token_weights
from posttrain.core.batch import RolloutBatch
from posttrain.core.config.sections import OptimizerSection
from posttrain.core.contracts import Aggregator, KlEstimator, PolicyLoss, RolloutCorrection
from posttrain.core.errors import RunError
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.math.masking import masked
from posttrain.core.plugin_manager import PluginEntry
from posttrain.core.runtime.seeding import generator
from posttrain.core.training.columns import ColumnFiller
from posttrain.core.training.learner import Learner
from posttrain.core.training.objective import LossTerm, MicroLoss, Objective
from posttrain.core.training.optim import MasterOptimizer
from posttrain.core.training.splitting import mini_rows
from posttrain.core.training.updates import UpdateSettings
from tests.helpers.losses import ACTIVE, MANAGER, build_aggregator, build_loss, policy_batch
from tests.helpers.plugins import of_kind
from tests.helpers.rollouts import load_tiny, ragged_batch

STEP = 7
SETTINGS = UpdateSettings(
    epochs=2, num_mini_batches=2, micro_batch_size=2, temperature=1.0, seed=11, max_tokens=None
)

# Losses that have no weight per token of the rollout, and why.
NO_WEIGHTS = {"ptx": "its tokens are those of pre-training batches, which evidence does not hold"}

# Losses with a stop-gradient inside, whose values' slopes are not what trains.
STOPPED = {
    *("cispo", "dppo", "fipo", "gspo_token", "positive_lm", "ref_kl", "sapo", "vanilla_pg"),
    "vespo",
}

LOSSES = [given for given in of_kind("policy_loss") if given.values[0].name not in NO_WEIGHTS]


def evidence_of_batch(seed: int = 0, kl_coef: float = 0.0) -> StepEvidence:
    """A step of two epochs of two mini-batches, in float64; NaN where nobody read."""
    batch, seen = policy_batch(seed)
    seen_by = torch.full((len(batch),), -1)
    minis = mini_rows(batch, 2, 2, SETTINGS.seed, "mini_batches", STEP)
    for number, rows in enumerate(minis):
        seen_by[rows] = number
    entropy = batch.column("entropy")
    return StepEvidence(STEP, batch, seen, entropy, seen_by, kl_coef)


def by_hand(
    evidence: StepEvidence, loss: PolicyLoss[Any], aggregator: Aggregator[Any]
) -> Callable[[Tensor], Tensor]:
    """The sum of the last epoch's losses as a function of all log-probs [B, T]."""
    minis = list(mini_rows(evidence.batch, 2, 2, SETTINGS.seed, "mini_batches", STEP))

    def total(logprobs: Tensor) -> Tensor:
        found = torch.zeros((), dtype=torch.float64)
        for number in (2, 3):
            rows = minis[number]
            mini = evidence.batch.select(rows)
            mini = mini.with_columns(logprobs_now=evidence.seen_logprobs[rows])
            draw = generator(SETTINGS.seed, "prepare", STEP, number)
            prepared = loss.prepare(mini, draw) if loss.needs_prepare() else None
            counts = aggregator.count(loss.loss_mask(mini), mini.group_id)
            for part in torch.arange(len(rows)).split(2):
                micro = mini.select(part)
                own = prepared and prepared.rows(part)
                result = loss.token_loss(logprobs[rows[part]], micro, own)
                weights = aggregator.weights(loss.loss_mask(micro), counts.rows(part))
                found = found + masked(result.loss * weights, result.mask).sum()
        return found

    return total


def differences(of: Callable[[Tensor], Tensor], at: Tensor, mask: Tensor) -> Tensor:
    """Central differences of a function of [B, T], where the mask is 1."""
    found, width = torch.zeros_like(at), 1e-6
    for row, column in mask.bool().nonzero().tolist():
        up, down = at.clone(), at.clone()
        up[row, column] += width
        down[row, column] -= width
        found[row, column] = (of(up) - of(down)) / (2 * width)
    return found


def assert_equal_to_1e6(got: Tensor, wanted: Tensor) -> None:
    largest = float(wanted.abs().max())
    assert largest > 0
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6 * largest)


def fields_of(entry: PluginEntry) -> dict[str, object]:
    return ACTIVE.get(entry.name, {}) if entry.package == "posttrain" else {}


@pytest.mark.parametrize("aggregator", [entry.name for entry in MANAGER.entries("aggregator")])
@pytest.mark.parametrize("entry", LOSSES)
def test_weights_are_the_gradients_that_autograd_finds(entry: PluginEntry, aggregator: str) -> None:
    loss, evidence = build_loss(entry.name, fields_of(entry)), evidence_of_batch()
    plugin = build_aggregator(aggregator)
    objective = Objective((LossTerm(loss, plugin),), plugin)
    found = token_weights(evidence, objective, SETTINGS)
    leaf = evidence.seen_logprobs.clone().requires_grad_()
    again = build_loss(entry.name, fields_of(entry))
    (wanted,) = torch.autograd.grad(by_hand(evidence, again, plugin)(leaf), leaf)
    assert_equal_to_1e6(found.total, wanted)
    assert not found.total[~evidence.batch.mask.bool()].any()
    states = {CLIP_STATES[int(state)] for state in found.clip.unique()}
    assert "no loss" in states and "none" in states


@pytest.mark.parametrize(
    "entry", [given for given in LOSSES if given.values[0].name not in STOPPED]
)
@pytest.mark.parametrize("aggregator", ["seq-mean-token-mean", "prompt-mean"])
def test_weights_are_the_slopes_that_finite_differences_find(
    entry: PluginEntry, aggregator: str
) -> None:
    if entry.package != "posttrain":
        pytest.skip("whether it stops gradients is not known here")
    loss, evidence = build_loss(entry.name, fields_of(entry)), evidence_of_batch(seed=3)
    plugin = build_aggregator(aggregator)
    found = token_weights(evidence, Objective((LossTerm(loss, plugin),), plugin), SETTINGS)
    of = by_hand(evidence, loss, plugin)
    with torch.no_grad():
        wanted = differences(of, evidence.seen_logprobs, evidence.batch.mask)
    assert_equal_to_1e6(found.total, wanted)


def test_a_loss_without_weights_says_why() -> None:
    """The list is of losses that exist and read no rollout; all others are covered above."""
    for name in NO_WEIGHTS:
        assert build_loss(name).source == "ptx"
    rollout = {e.name for e in MANAGER.entries("policy_loss") if build_loss(e.name).source != "ptx"}
    assert rollout == {given.values[0].name for given in LOSSES}


# --- the gradients that arrive in a real learner ----------------------------------------------


class Listening(Objective):
    """An objective that notes the gradient of each micro-batch's log-probs, by row of the batch."""

    heard: ClassVar[dict[int, Tensor]] = {}

    def loss(self, logprobs: Tensor, entropy: Tensor, micro: RolloutBatch, *rest: Any) -> MicroLoss:
        of = [int(i) for i in micro.seq_id]
        logprobs.register_hook(
            lambda grad: self.heard.update(zip(of, grad.detach().clone(), strict=True))
        )
        return Objective.loss(self, logprobs, entropy, micro, *rest)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def objective_parts(name: str) -> dict[str, Any]:
    """Fields of an objective of each shape that changes what a weight is made of."""
    mean, kl = build_aggregator("seq-mean-token-mean"), MANAGER.build(KlEstimator, "k3")
    ratio_kl = MANAGER.build(KlEstimator, "k3_is", {"is_ratio": "policy"})
    tis = MANAGER.build(RolloutCorrection, "tis_token", {})
    ppo = LossTerm(build_loss("ppo_clip", {"clip_low": 0.1, "clip_high": 0.1}), mean)
    token = build_aggregator("token-mean")
    return {
        "kl, entropy and correction": {
            "terms": (ppo,),
            "kl": kl,
            "entropy_coef": 0.01,
            "correction": tis,
        },
        "idle rows": {"terms": (ppo,)},
        "ratio in the kl": {"terms": (ppo,), "kl": ratio_kl},
        "two terms": {
            "terms": (ppo, LossTerm(build_loss("positive_lm"), token, coef=0.3)),
        },
        "prepared": {"terms": (LossTerm(build_loss("clip_cov", ACTIVE["clip_cov"]), token),)},
        "bounds": {"terms": (LossTerm(build_loss("bapo"), token),)},
        "bypass": {"terms": (ppo,), "correction": tis, "bypass_old": True},
        "entropy mask": {"terms": (ppo,), "top_entropy": 0.5},
        "micro counts": {
            "terms": (
                LossTerm(
                    ppo.loss,
                    build_aggregator("token-mean", {"counts": "micro", "allow_local": True}),
                ),
            )
        },
    }[name] | {"aggregator": mean}


@pytest.mark.parametrize(
    "shape",
    [
        "kl, entropy and correction",
        "idle rows",
        "ratio in the kl",
        "two terms",
        "prepared",
        "bounds",
        "bypass",
        "entropy mask",
        "micro counts",
    ],
)
def test_weights_are_the_gradients_that_arrived_in_the_learner(shape: str, model_dir: Path) -> None:
    objective = Listening(**objective_parts(shape))
    kl_coef = 0.1 if objective.kl is not None else 0.0
    batch = ragged_batch([4, 6, 3, 5], group_size=3)
    advantages = batch.column("advantages").clone()
    advantages[:] = masked(advantages[:, :1].expand_as(advantages), batch.mask)
    advantages[4] = 0
    noise = torch.Generator().manual_seed(1)
    engine = -4.5 + 0.3 * torch.randn(batch.mask.shape, generator=noise)
    batch = batch.with_columns(
        advantages=advantages.float(),
        rollout_logprobs=engine,
        acc=(torch.arange(len(batch)) % 2).float(),
    )
    model, settings = load_tiny(model_dir, torch.float32), UpdateSettings(2, 2, 2, 1.0, 5)
    section = OptimizerSection(learning_rate=1e-4)
    learner = Learner(
        model, MasterOptimizer(model, section, 8), objective, settings, load_tiny(model_dir)
    )
    Listening.heard.clear()
    batch = ColumnFiller(learner).fill_for_update(batch, STEP, kl_coef).batch
    result = learner.update(batch, STEP, kl_coef)
    evidence = StepEvidence(
        STEP,
        batch.with_columns(old_logprobs=result.old_logprobs),
        result.seen.logprobs,
        result.seen.entropy,
        result.seen_by,
        kl_coef,
    )
    wanted = torch.zeros_like(result.seen.logprobs)
    for row, grad in Listening.heard.items():  # of the last update on each row
        wanted[row] = grad.to(wanted)
    if shape == "idle rows":
        assert result.seen_by[4] == -1 and 4 not in Listening.heard
    found = token_weights(evidence, objective, settings)
    largest = float(wanted.abs().max())
    torch.testing.assert_close(found.total, wanted, rtol=0, atol=2e-5 * largest)
    assert (found.total != 0).sum() > 7
    if kl_coef:
        assert not torch.allclose(found.total, found.policy)


# --- what does not fit is refused -------------------------------------------------------------


def test_settings_of_another_stage_are_refused() -> None:
    mean, loss = build_aggregator("token-mean"), build_loss("ppo_clip")
    objective = Objective((LossTerm(loss, mean),), mean)
    other = UpdateSettings(1, 2, 2, 1.0, SETTINGS.seed)
    with pytest.raises(RunError, match="not cut into mini-batches as these settings"):
        token_weights(evidence_of_batch(), objective, other)


def test_a_loss_of_whole_mini_batches_is_refused_when_one_was_not_read_whole() -> None:
    mean, evidence = build_aggregator("token-mean"), evidence_of_batch()
    row = int((evidence.batch.mask.bool().any(dim=1)).nonzero()[0])
    evidence.seen_by[row] = -1
    objective = Objective((LossTerm(build_loss("bapo"), mean),), mean)
    with pytest.raises(RunError, match="looks at a whole mini-batch"):
        token_weights(evidence, objective, SETTINGS)


def test_a_missing_column_is_named() -> None:
    mean, evidence = build_aggregator("token-mean"), evidence_of_batch()
    object.__setattr__(evidence.batch, "acc", None)
    objective = Objective((LossTerm(build_loss("positive_lm"), mean),), mean)
    with pytest.raises(RunError, match="acc"):
        token_weights(evidence, objective, SETTINGS)
