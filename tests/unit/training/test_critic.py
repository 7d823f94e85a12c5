"""The critic: values of states before tokens, exact micro-batches, and that it learns."""

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
from posttrain.core.contracts import Aggregator
from posttrain.core.data.tokens import response_batch
from posttrain.core.errors import ResourceError, RunError
from posttrain.core.kit.tiny import make_tiny_model, make_tiny_tokenizer
from posttrain.core.models.device import ModelRuntime
from posttrain.core.models.loading import load_reward_model, load_value_model, save_model
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.training.critic import Critic, CriticSettings, response_values
from posttrain.core.training.metrics import MetricSums
from posttrain.core.training.optim import MasterOptimizer
from posttrain.core.training.reward_model import score_batch_rows
from tests.helpers.rollouts import (
    PROBLEM,
    assert_same_gradient,
    gradient_of,
    ragged_batch,
    sequence,
)

DOUBLE = ModelRuntime(torch.device("cpu"), torch.float64, "sdpa")
SINGLE = ModelRuntime(torch.device("cpu"), torch.float32, "eager")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def make_critic(
    manager: PluginManager,
    model: PreTrainedModel,
    *,
    aggregator: str = "token-mean",
    rate: float = 1e-3,
    **settings: Any,
) -> Critic:
    fields = {"epochs": 1, "num_mini_batches": 1, "micro_batch_size": 4, "seed": 0} | settings
    optimizer = MasterOptimizer(
        model, OptimizerSection(learning_rate=rate, max_grad_norm=None), 1000
    )
    return Critic(
        model,
        optimizer,
        CriticSettings(aggregator=manager.build(Aggregator, aggregator), **fields),
    )


def valued_batch(seed: int = 0) -> RolloutBatch:
    """Ragged rows with values and returns; where there is no loss they are NaN."""
    batch = ragged_batch([5, 9, 3, 4], group_size=3, seed=seed)
    draw = torch.Generator().manual_seed(seed)
    values, returns = torch.randn(2, *batch.mask.shape, generator=draw, dtype=torch.float64)
    nowhere = ~batch.mask.bool()
    return batch.with_columns(
        values=values.masked_fill(nowhere, float("nan")),
        returns=returns.masked_fill(nowhere, float("nan")),
    )


def alone(model: PreTrainedModel, batch: RolloutBatch, row: int) -> Tensor:
    """Head of one unpadded sequence's states [n + 1]: after its prompt and after each token."""
    prompt, response = sequence(batch, row)
    hidden = model.base_model(torch.cat([prompt, response])[None]).last_hidden_state[0]
    scores: Tensor = model.get_submodule("score")(hidden)
    return scores[len(prompt) - 1 :, 0]


def test_values_are_those_of_the_states_before_each_token(
    model_dir: Path, manager: PluginManager
) -> None:
    model = load_value_model(model_dir, SINGLE, "normal", seed=3)
    batch = ragged_batch([5, 9, 3], group_size=3)
    values, bootstrap = make_critic(manager, model).values(batch)
    assert values.dtype == bootstrap.dtype == torch.float32 and not values.requires_grad
    assert not values[~batch.response_mask.bool()].any()
    for row in range(len(batch)):
        with torch.no_grad():
            states = alone(model, batch, row)
        torch.testing.assert_close(values[row, : len(states) - 1], states[:-1], rtol=0, atol=1e-5)
        torch.testing.assert_close(bootstrap[row], states[-1], rtol=0, atol=1e-5)


def test_the_bootstrap_value_follows_the_last_sampled_token_across_a_gap(
    model_dir: Path, manager: PluginManager
) -> None:
    model = load_value_model(model_dir, SINGLE, "normal")
    hole = torch.tensor([[1, 1, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    ids = torch.arange(18).view(3, 6) + 10
    whole = response_batch(
        prompts=[[7, 8]] * 3,
        responses=ids.tolist(),
        group_ids=[0, 0, 0],
        pad_token_id=0,
        problems=[PROBLEM] * 3,
        response_logprobs=[[-1.0] * 6] * 3,
    )
    batch = replace(whole, response_mask=hole, mask=hole)
    values, bootstrap = make_critic(manager, model).values(batch)
    with torch.no_grad():
        everything = torch.stack([alone(model, whole, row) for row in range(3)])
    torch.testing.assert_close(values, everything[:, :-1] * hole, rtol=0, atol=1e-5)
    after = everything[torch.arange(3), torch.tensor([5, 1, 0])]
    torch.testing.assert_close(bootstrap, after, rtol=0, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(bootstrap, score_batch_rows(model, batch), rtol=0, atol=1e-6)


@pytest.mark.parametrize("aggregator", ["token-mean", "seq-mean-token-mean", "prompt-mean"])
@pytest.mark.parametrize(("clip", "huber"), [(0.2, None), (None, None), (0.2, 0.5)])
def test_micro_batches_of_any_size_give_the_gradient_of_one_big_batch(
    model_dir: Path,
    manager: PluginManager,
    aggregator: str,
    clip: float | None,
    huber: float | None,
) -> None:
    batch, found, losses = valued_batch(), [], []
    for size in (12, 5, 1):
        model = load_value_model(model_dir, DOUBLE, "normal")
        critic = make_critic(
            manager,
            model,
            aggregator=aggregator,
            micro_batch_size=size,
            clip=clip,
            huber_delta=huber,
        )
        critic.optimizer.close()  # gradients stay in float64 on the model
        losses.append(critic._accumulate(batch, MetricSums()))
        found.append(gradient_of(model))
    for split, loss in zip(found[1:], losses[1:], strict=True):
        assert_same_gradient(split, found[0])
        assert loss == pytest.approx(losses[0], rel=1e-6)


def test_the_gradient_is_that_of_the_mean_squared_error(
    model_dir: Path, manager: PluginManager
) -> None:
    model = load_value_model(model_dir, DOUBLE, "normal")
    batch = valued_batch()
    critic = make_critic(manager, model, clip=None)
    critic.optimizer.close()
    critic._accumulate(batch, MetricSums())
    got = gradient_of(model)
    model.zero_grad()
    total: Tensor = torch.zeros((), dtype=torch.float64)
    for row in range(len(batch)):
        error = alone(model, batch, row)[:-1] - batch.column("returns")[row, : _length(batch, row)]
        total = total + error[batch.mask[row, : len(error)].bool()].square().sum() / 2
    (total / batch.mask.sum()).backward()  # type: ignore[no-untyped-call]
    assert_same_gradient(got, gradient_of(model))


def _length(batch: RolloutBatch, row: int) -> int:
    return int(batch.response_mask[row].sum())


def test_a_critic_learns_what_the_prompt_says_about_the_return(
    model_dir: Path, manager: PluginManager
) -> None:
    """The first token of the prompt decides the mean return, among three that do not matter."""
    draw = torch.Generator().manual_seed(0)

    def rollout(seed: int) -> RolloutBatch:
        batch = ragged_batch([4] * 8, group_size=4, seed=seed)
        prompt_ids, high = batch.prompt_ids.clone(), batch.group_id % 2
        prompt_ids[:, 0] = 10 + high
        noise = 0.2 * torch.randn(len(batch), generator=draw, dtype=torch.float64)
        returns = (high + noise)[:, None].expand(batch.mask.shape)
        return batch.with_columns(prompt_ids=prompt_ids, returns=returns)

    critic = make_critic(
        manager,
        load_value_model(model_dir, SINGLE, "zero"),
        epochs=2,
        num_mini_batches=2,
        micro_batch_size=16,
        rate=3e-3,
        clip=0.5,
    )
    explained = []
    for step in range(20):
        batch = rollout(step)
        values, bootstrap = critic.values(batch)
        batch = batch.with_columns(values=values, bootstrap_value=bootstrap)
        metrics = critic.update(batch, step)
        explained.append(metrics["value/ev"])
    assert explained[0] == pytest.approx(0.0, abs=1e-6)  # a head of zeros explains nothing
    assert max(explained[-5:]) > 0.5
    assert metrics["value/lr"] == 3e-3 and metrics["value/grad_norm"] > 0
    assert 0 <= metrics["value/clip_frac"] < 1
    assert metrics["value/mean"] == pytest.approx(float(values[batch.mask.bool()].mean()), rel=1e-5)


def test_values_that_left_the_band_are_counted_and_pull_no_more(
    model_dir: Path, manager: PluginManager
) -> None:
    model = load_value_model(model_dir, DOUBLE, "zero")  # every value is 0
    batch = valued_batch()
    shape = batch.mask.shape
    # 0 lies 0.3 above the band [-0.7, -0.3] of old values -0.5; returns of 1 are further above.
    batch = batch.with_columns(
        values=torch.full(shape, -0.5, dtype=torch.float64),
        returns=torch.ones(shape, dtype=torch.float64),
    )
    critic = make_critic(manager, model, clip=0.2)
    critic.optimizer.close()
    sums = MetricSums()
    critic._accumulate(batch, sums)
    assert sums.result()["value/clip_frac"] == 1.0
    assert all(not g.any() for g in gradient_of(model))


def test_a_batch_without_loss_moves_nothing_and_says_no_explained_variance(
    model_dir: Path, manager: PluginManager
) -> None:
    model = load_value_model(model_dir, SINGLE, "normal")
    before = [p.detach().clone() for p in model.parameters()]
    batch = valued_batch()
    batch = batch.with_columns(mask=torch.zeros_like(batch.mask))
    metrics = make_critic(manager, model, num_mini_batches=2).update(batch, step=0)
    assert "value/ev" not in metrics and metrics["loss/value"] == 0.0
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, new)


def test_columns_are_asked_for_and_a_stop_is_heard(model_dir: Path, manager: PluginManager) -> None:
    critic = make_critic(manager, load_value_model(model_dir, SINGLE, "zero"))
    with pytest.raises(RunError, match="the critic needs.*returns.*values"):
        critic.update(ragged_batch([3], 2), step=0)

    def stop() -> None:
        raise InterruptedError

    critic.check = stop
    with pytest.raises(InterruptedError):
        critic.values(ragged_batch([3], 2))
    with pytest.raises(InterruptedError):
        critic.update(valued_batch(), 0)


def test_heads_new_and_kept(model_dir: Path, tmp_path: Path, manager: PluginManager) -> None:
    zero = load_value_model(model_dir, SINGLE, "zero").get_submodule("score")
    assert not zero.weight.any()
    normal = load_value_model(model_dir, SINGLE, "normal", seed=1)
    weight = normal.get_submodule("score").weight
    assert 65 * float(weight.detach().square().mean()) == pytest.approx(1.0, abs=0.5)
    again = load_value_model(model_dir, SINGLE, "normal", seed=1).get_submodule("score").weight
    other = load_value_model(model_dir, SINGLE, "normal", seed=2).get_submodule("score").weight
    assert torch.equal(weight, again) and not torch.equal(weight, other)

    folder = tmp_path / "critic"
    save_model(normal, make_tiny_tokenizer(), folder)
    batch = ragged_batch([4], 3)
    kept = load_value_model(folder, SINGLE, "keep")
    for left, right in zip(
        response_values(normal, batch), response_values(kept, batch), strict=True
    ):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-5)
    # A critic that starts from a reward model says at the end what the reward model says.
    judge = load_reward_model(folder, SINGLE, new_head=False)
    with torch.no_grad():
        _, bootstrap = make_critic(manager, kept).values(batch)
        torch.testing.assert_close(bootstrap, score_batch_rows(judge, batch), rtol=0, atol=1e-6)
    with pytest.raises(ResourceError, match="LlamaForCausalLM.*not a model with a scalar head"):
        load_value_model(model_dir, SINGLE, "keep")


def test_bfloat16_values_keep_more_than_three_digits(
    model_dir: Path, manager: PluginManager
) -> None:
    runtime = ModelRuntime(torch.device("cpu"), torch.bfloat16, "eager")
    model = load_value_model(model_dir, runtime, "normal")
    batch = ragged_batch([4, 6], 3)
    values, _ = make_critic(manager, model).values(batch)
    kept = values[batch.response_mask.bool()]
    assert (kept != kept.bfloat16().float()).any()
    metrics = make_critic(manager, model).update(
        batch.with_columns(values=values, returns=torch.ones_like(values)), step=0
    )
    assert metrics["loss/value"] > 0
