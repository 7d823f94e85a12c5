"""The learner and its forward pass: exact whatever the split, on a tiny Llama.

Llama computes norms and rotary angles in float32 whatever its weights are, so equalities through
the model hold to float32; those of the aggregators alone hold to 1e-9 (tests/contract).
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.core.batch import RolloutBatch
from posttrain.core.config.sections import OptimizerSection
from posttrain.core.contracts import Aggregator, KlEstimator, PolicyLoss
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.math.nucleus import Cut
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.training.columns import ColumnFiller
from posttrain.core.training.forward import response_logprobs
from posttrain.core.training.learner import Learner, Progress
from posttrain.core.training.logprobs import cut_logprobs
from posttrain.core.training.metrics import MetricSums
from posttrain.core.training.objective import LossTerm, Objective
from posttrain.core.training.optim import MasterOptimizer, schedule_factor
from posttrain.core.training.updates import UpdateSettings
from tests.helpers.rollouts import assert_same_gradient, load_tiny, ragged_batch, sequence
from tests.helpers.updates import update


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def reference_logprobs(model: PreTrainedModel, batch: RolloutBatch, temperature: float) -> Tensor:
    """One sequence at a time, nothing shared, nothing padded."""
    result = torch.zeros(batch.response_ids.shape, dtype=torch.float64)
    for row in range(len(batch)):
        prompt, response = sequence(batch, row)
        logits = model(torch.cat([prompt, response])[None]).logits[0] / temperature
        logp = torch.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1]
        result[row, : len(response)] = logp.gather(1, response[:, None])[:, 0]
    return result


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_shared_prompts_give_the_log_probs_and_gradients_of_separate_sequences(
    model_dir: Path, temperature: float
) -> None:
    model = load_tiny(model_dir)
    batch = ragged_batch([5, 9, 3], group_size=3)
    weights = torch.randn(batch.response_ids.shape, dtype=torch.float64)
    gradients = []
    for logprobs in (
        response_logprobs(model, batch, temperature=temperature).logprobs,
        reference_logprobs(model, batch, temperature),
    ):
        model.zero_grad()
        (logprobs * weights).sum().backward()  # type: ignore[no-untyped-call]
        gradients.append((logprobs.detach(), [p.grad.clone() for p in model.parameters()]))
    torch.testing.assert_close(gradients[0][0], gradients[1][0], rtol=0, atol=1e-6)
    assert_same_gradient(gradients[0][1], gradients[1][1])


def test_tokens_of_a_tool_between_sampled_ones_are_attended_to(model_dir: Path) -> None:
    model = load_tiny(model_dir)
    batch = ragged_batch([4], group_size=1)
    ids = torch.tensor([[10, 11, 12, 13, 14]])
    hole = torch.tensor([[1, 1, 0, 0, 1]])
    shape = ids.shape
    holed = replace(
        batch,
        response_ids=ids,
        response_mask=hole,
        mask=hole,
        rollout_logprobs=torch.zeros(shape),
        policy_version=torch.zeros(shape, dtype=torch.int64),
        advantages=None,
    )
    full = replace(holed, response_mask=torch.ones_like(hole), mask=torch.ones_like(hole))
    with torch.no_grad():
        got = response_logprobs(model, holed, temperature=1.0).logprobs
        everything = response_logprobs(model, full, temperature=1.0).logprobs
    torch.testing.assert_close(got, everything * hole)


def test_chunked_log_probs_and_entropy_have_exact_gradients() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(11, (7,))

    def chunked(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return cut_logprobs(h, w, targets, Cut(), temperature=0.7, chunk=3)[:2]

    logp = torch.log_softmax(hidden @ weight.t() / 0.7, dim=-1)
    values, entropy = chunked(hidden, weight)
    torch.testing.assert_close(values, logp.gather(1, targets[:, None])[:, 0])
    torch.testing.assert_close(entropy, -(logp * logp.exp()).sum(dim=1))
    assert torch.autograd.gradcheck(chunked, (hidden, weight))


def learner_for(
    model: PreTrainedModel, manager: PluginManager, aggregator: str, micro: int, **options: Any
) -> Learner:
    built = manager.build(Aggregator, aggregator, options.pop("aggregator_config", {}))
    loss = manager.build(PolicyLoss, *options.pop("policy_loss", ("ppo_clip", {})))
    objective = Objective(
        terms=(LossTerm(loss, built),),
        aggregator=built,
        kl=manager.build(KlEstimator, "k3"),
        entropy_coef=options.pop("entropy_coef", 0.0),
    )
    settings = UpdateSettings(
        epochs=options.pop("epochs", 1),
        num_mini_batches=options.pop("num_mini_batches", 1),
        micro_batch_size=micro,
        temperature=1.0,
        seed=0,
    )
    optimizer = MasterOptimizer(model, OptimizerSection(learning_rate=1e-3), 10)
    return Learner(model, optimizer, objective, settings, **options)


def gradient(learner: Learner, batch: RolloutBatch, kl_coef: float) -> list[Tensor]:
    batch = ColumnFiller(learner).fill_for_update(batch, 1, kl_coef).batch
    done = Progress.of(batch, 1, kl_coef)
    batch, prepared = learner._prepare(done, batch, 0)
    idle = torch.zeros(len(batch), dtype=torch.bool)
    learner._accumulate(done, batch, prepared, idle, MetricSums())
    return [p.grad.clone() for p in learner.model.parameters() if p.grad is not None]


AGGREGATORS: list[tuple[str, dict[str, object]]] = [
    ("token-sum", {}),
    ("token-mean", {}),
    ("seq-mean-token-mean", {}),
    ("seq-mean-token-sum", {}),
    ("seq-sum-token-mean", {}),
    ("seq-mean-token-sum-norm", {"norm_length": 8}),
]


@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
@pytest.mark.parametrize(("name", "fields"), AGGREGATORS, ids=[a[0] for a in AGGREGATORS])
def test_micro_batches_of_any_size_give_the_gradient_of_one_big_batch(
    model_dir: Path,
    manager: PluginManager,
    name: str,
    fields: dict[str, object],
    entropy_coef: float,
) -> None:
    batch = ragged_batch([5, 9, 3, 4], group_size=3)
    batch = batch.with_columns(ref_logprobs=torch.full(batch.response_ids.shape, -2.0))
    found = []
    for micro in (12, 5, 1):
        model = load_tiny(model_dir)
        learner = learner_for(
            model, manager, name, micro, entropy_coef=entropy_coef, aggregator_config=fields
        )
        learner.optimizer.close()  # gradients stay in float64 on the model
        found.append(gradient(learner, batch, kl_coef=0.3))
    for split in found[1:]:
        assert_same_gradient(split, found[0])


def test_the_first_update_on_policy_is_a_plain_policy_gradient(
    model_dir: Path, manager: PluginManager
) -> None:
    model = load_tiny(model_dir)
    batch = ragged_batch([5, 4], group_size=3)
    learner = learner_for(model, manager, "token-mean", 6)
    learner.optimizer.close()
    got = gradient(learner, batch, kl_coef=0.0)
    model.zero_grad()
    out = response_logprobs(model, batch, temperature=1.0)
    loss = -(out.logprobs * batch.column("advantages") * batch.mask).sum() / batch.mask.sum()
    loss.backward()  # type: ignore[no-untyped-call]
    assert_same_gradient(got, [p.grad for p in model.parameters() if p.grad is not None])


def test_a_batch_without_any_scored_row_changes_no_weight(
    model_dir: Path, manager: PluginManager
) -> None:
    model = load_tiny(model_dir, torch.float32)
    before = [p.detach().clone() for p in model.parameters()]
    batch = ragged_batch([5], group_size=3)
    empty = batch.with_columns(mask=torch.zeros_like(batch.mask))
    learner = learner_for(model, manager, "token-mean", 3)
    result = update(learner, empty, 1, 0.0)
    assert result.metrics["train/skipped_empty"] == 1.0
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, new)


def test_more_updates_per_batch_move_the_ratio_off_one(
    model_dir: Path, manager: PluginManager
) -> None:
    batch = ragged_batch([5, 4, 6, 3], group_size=3)
    one = learner_for(load_tiny(model_dir, torch.float32), manager, "token-mean", 12)
    metrics = update(one, batch, 1, 0.0).metrics
    assert metrics["ratio/max"] == metrics["ratio/min"] == 1.0
    four = learner_for(
        load_tiny(model_dir, torch.float32), manager, "token-mean", 12, epochs=2, num_mini_batches=2
    )
    metrics = update(four, batch, 1, 0.0).metrics
    assert metrics["ratio/max"] > 1.001 > 0.999 > metrics["ratio/min"]


def test_bfloat16_weights_follow_their_float32_masters(model_dir: Path) -> None:
    model = load_tiny(model_dir, torch.bfloat16)
    section = OptimizerSection(learning_rate=1e-6, max_grad_norm=None)
    optimizer = MasterOptimizer(model, section, 100)
    start = [m.clone() for m in optimizer.state_dict()["masters"]]
    for _ in range(50):
        for param in model.parameters():
            param.backward(torch.ones_like(param))  # type: ignore[no-untyped-call]
        optimizer.step()
    for old, new, param in zip(
        start, optimizer.state_dict()["masters"], model.parameters(), strict=True
    ):
        # 50 steps of 1e-6 add up in float32; in bfloat16 each would have been rounded away.
        torch.testing.assert_close(new - old, torch.full_like(old, -5e-5), rtol=0.02, atol=0)
        assert torch.equal(param, new.to(torch.bfloat16))


def test_the_schedule_warms_up_then_decays() -> None:
    section = OptimizerSection(learning_rate=1.0, warmup_steps=4, schedule="linear")
    factors = [schedule_factor(section, step, 14) for step in (0, 3, 4, 9, 14)]
    assert factors == pytest.approx([0.25, 1.0, 1.0, 0.5, 0.0])
    cosine = section.model_copy(update={"schedule": "cosine"})
    assert schedule_factor(cosine, 9, 14) == pytest.approx(0.5)
    assert math.isclose(schedule_factor(cosine, 14, 14), 0.0, abs_tol=1e-12)


def test_gradients_of_micro_batches_add_up_in_the_float32_masters(model_dir: Path) -> None:
    model = load_tiny(model_dir, torch.bfloat16)
    optimizer = MasterOptimizer(model, OptimizerSection(), 10)
    for value in (1.0, 2.0**-10):  # in bfloat16 the sum would be 1
        for param in model.parameters():
            param.backward(torch.full_like(param, value))  # type: ignore[no-untyped-call]
    for master, param in zip(optimizer._masters, model.parameters(), strict=True):
        assert param.grad is None
        assert master.grad is not None and master.grad.dtype == torch.float32
        assert torch.equal(master.grad, torch.full_like(master, 1.0 + 2.0**-10))
