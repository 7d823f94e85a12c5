"""Numbers that are not finite: no step on them, no weight made of them, said where they came from.

Every kind of training goes through `MasterOptimizer`, so each is tried with a loss that is not
finite for one row, and with a gradient that is not finite although the loss is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.core.config.rl_stage import RlStage
from posttrain.core.config.sections import OptimizerSection
from posttrain.core.contracts import Aggregator, PairLoss, PolicyLoss, PreferenceLoss
from posttrain.core.data.preference import LabelledAnswer, Pair
from posttrain.core.errors import ResourceError, RunError
from posttrain.core.kit.tiny import make_tiny_model, make_tiny_tokenizer
from posttrain.core.models.device import ModelRuntime
from posttrain.core.models.loading import (
    load_policy,
    load_reward_model,
    load_value_model,
    save_model,
)
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.training.critic import Critic, CriticSettings
from posttrain.core.training.finite import FiniteGuard, NonFinite
from posttrain.core.training.forward import check_passes
from posttrain.core.training.learner import Learner
from posttrain.core.training.natural_gradient import NaturalGradient
from posttrain.core.training.objective import LossTerm, Objective
from posttrain.core.training.optim import MasterOptimizer
from posttrain.core.training.preference import PreferenceLearner
from posttrain.core.training.preference_objective import PreferenceObjective, PreferenceTerm
from posttrain.core.training.reward_model import reward_step
from posttrain.core.training.sft import sft_step
from posttrain.core.training.updates import UpdateSettings
from posttrain.core.types import Problem
from posttrain.pipelines.rl.recording import Recorder
from tests.helpers.rollouts import ragged_batch

RUNTIME = ModelRuntime(torch.device("cpu"), torch.float32, "eager")
NAN, INF = float("nan"), float("inf")
BAD = 2
"""The row that is to blame."""
ROWS = 6
BAD_TOKEN = 60
"""Whose embedding is set to what makes a row's numbers not finite."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), tied=False)


def embedding(model: PreTrainedModel) -> Tensor:
    found: Tensor = model.get_input_embeddings().weight  # type: ignore[union-attr,assignment]
    return found


@contextmanager
def poisoned(model: PreTrainedModel, how: str) -> Iterator[None]:
    """Rows with the bad token have a loss, or a gradient alone, that is not finite."""
    check_passes(model)  # with numbers that are finite still
    weight = embedding(model)
    handle = None
    if how == "loss":
        layer: Any = model.get_input_embeddings()

        def spoil(module: Any, args: Any, out: Tensor) -> Tensor:
            return torch.where((args[0] == BAD_TOKEN)[..., None], NAN, out)

        handle = layer.register_forward_hook(spoil)
    else:
        handle = weight.register_hook(lambda grad: grad * NAN)
    yield
    handle.remove()


def tokens(row: int) -> tuple[int, ...]:
    return (BAD_TOKEN if row == BAD else 30, 20 + row)


def batch() -> Any:
    made = ragged_batch([3] * (ROWS // 2), group_size=2)
    ids = torch.full_like(made.response_ids, 30)
    ids[BAD, 0] = BAD_TOKEN
    shape = made.mask.shape
    prompts = torch.full_like(made.prompt_ids, 10)
    return replace(made, response_ids=ids, prompt_ids=prompts).with_columns(
        advantages=torch.ones(shape),
        old_logprobs=torch.full(shape, -4.0),
        ref_logprobs=torch.full(shape, -4.0),
        entropy=torch.ones(shape),
        values=torch.zeros(shape),
        returns=torch.ones(shape),
    )


@dataclass
class Case:
    """A model, its optimizer, and a step that returns metrics."""

    model: PreTrainedModel
    optimizer: MasterOptimizer
    step: Callable[[], dict[str, float]]
    metric: str = "grad/non_finite"


def sft(folder: Path, manager: PluginManager) -> Case:
    model = load_policy(folder, RUNTIME)
    optimizer = MasterOptimizer(model, OptimizerSection(learning_rate=1e-2), 9)
    return Case(model, optimizer, lambda: sft_step(model, optimizer, batch(), micro_batch_size=2))


def reward_model(folder: Path, manager: PluginManager) -> Case:
    model = load_reward_model(folder, RUNTIME, new_head=True)
    optimizer = MasterOptimizer(model, OptimizerSection(learning_rate=1e-2), 9)
    pairs = [Pair(f"k{row}", (4, 5), tokens(row), (40, 7)) for row in range(ROWS)]
    loss = manager.build(PairLoss, "bradley_terry")
    step = lambda: reward_step(model, optimizer, pairs, loss, micro_batch_size=2)  # noqa: E731
    return Case(model, optimizer, step)


def preference(name: str, labelled: bool) -> Callable[[Path, PluginManager], Case]:
    def make(folder: Path, manager: PluginManager) -> Case:
        model = load_policy(folder, RUNTIME)
        optimizer = MasterOptimizer(model, OptimizerSection(learning_rate=1e-2), 9)
        objective = PreferenceObjective((PreferenceTerm(manager.build(PreferenceLoss, name)),))
        reference = load_policy(folder, RUNTIME)
        learner = PreferenceLearner(model, objective, 0, 2, reference)
        pairs = [Pair(f"k{row}", (4, 5), tokens(row), (40, 7)) for row in range(ROWS)]
        rows: Any = pairs
        if labelled:
            rows = [
                LabelledAnswer(p.key, (4, 5 + i), p.chosen_ids, bool(i % 2))
                for i, p in enumerate(pairs)
            ]
        return Case(model, optimizer, lambda: learner.step(rows, optimizer))

    return make


def learner(folder: Path, manager: PluginManager) -> Case:
    model = load_policy(folder, RUNTIME)
    optimizer = MasterOptimizer(model, OptimizerSection(learning_rate=1e-2), 9)
    made = make_learner(model, optimizer, manager, "ppo_clip")
    return Case(model, optimizer, lambda: made.update(batch(), 1, 0.0).metrics)


def make_learner(
    model: PreTrainedModel,
    optimizer: MasterOptimizer,
    manager: PluginManager,
    loss: str,
    num_mini_batches: int = 1,
) -> Learner:
    aggregator = manager.build(Aggregator, "token-mean")
    policy_loss = manager.build(PolicyLoss, loss)
    objective = Objective((LossTerm(policy_loss, aggregator, 1.0),), aggregator)
    settings = UpdateSettings(1, num_mini_batches, 2, 1.0, 0)
    region = None
    if policy_loss.owns_update:
        region = NaturalGradient(model, policy_loss.config, 1.0, 2)
    return Learner(model, optimizer, objective, settings, trust_region=region)


def trust_region(folder: Path, manager: PluginManager) -> Case:
    model = load_policy(folder, RUNTIME)
    optimizer = MasterOptimizer(model, OptimizerSection(learning_rate=1e-2), 9)
    made = make_learner(model, optimizer, manager, "trpo")
    return Case(model, optimizer, lambda: made.update(batch(), 1, 0.0).metrics)


def critic(folder: Path, manager: PluginManager) -> Case:
    model = load_value_model(folder, RUNTIME, "normal")
    optimizer = MasterOptimizer(model, OptimizerSection(learning_rate=1e-2), 9)
    aggregator = manager.build(Aggregator, "token-mean")
    settings = CriticSettings(
        epochs=1, num_mini_batches=1, micro_batch_size=2, aggregator=aggregator, seed=0, clip=None
    )
    made = Critic(model, optimizer, settings)
    return Case(model, optimizer, lambda: made.update(batch(), 1), "value/non_finite")


KINDS = {
    "sft": sft,
    "reward_model": reward_model,
    "dpo": preference("dpo", False),
    "kto": preference("kto", True),
    "policy": learner,
    "trpo": trust_region,
    "critic": critic,
}


def weights(model: PreTrainedModel) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("how", ["loss", "gradient"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_step_is_taken_and_it_is_said_where_it_came_from(
    model_dir: Path, manager: PluginManager, kind: str, how: str
) -> None:
    case, clean = (KINDS[kind](model_dir, manager) for _ in range(2))
    before = weights(case.model)
    with poisoned(case.model, how):
        metrics = case.step()
    assert metrics[case.metric] == 1.0
    (found,) = case.optimizer.take_non_finite()
    assert not case.optimizer.take_non_finite(), "reported once"
    assert ("the loss" in found.what) == (how == "loss")
    micro = () if kind == "critic" else (BAD,)  # a value's loss is not taken apart by rows
    wanted = micro if how == "loss" else tuple(range(ROWS))
    assert set(wanted) <= set(found.rows) and len(found.rows) <= max(2, len(wanted))
    assert all(torch.equal(a, b) for a, b in zip(before, case.model.parameters(), strict=True))
    if kind == "trpo":
        return
    state = case.optimizer.state_dict()
    assert not state["optimizer"]["state"], "nor has a moment begun"
    # The next step is what it would be had there been none before it.
    assert case.metric not in case.step()
    clean.step()
    pairs = zip(case.model.parameters(), clean.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not case.optimizer.take_non_finite()


def test_of_several_mini_batches_the_others_are_taken(
    model_dir: Path, manager: PluginManager
) -> None:
    model = load_policy(model_dir, RUNTIME)
    optimizer = MasterOptimizer(model, OptimizerSection(learning_rate=1e-2), 9)
    made = make_learner(model, optimizer, manager, "ppo_clip", num_mini_batches=3)
    with poisoned(model, "loss"):
        metrics = made.update(batch(), 1, 0.0).metrics
    assert metrics["grad/non_finite"] == 1.0 and metrics["train/updates"] == 2.0
    assert all(math.isfinite(value) for value in metrics.values()), metrics
    (found,) = optimizer.take_non_finite()
    assert found.rows == (BAD,), "numbered in the whole batch"


def test_weights_that_a_step_on_finite_numbers_spoils_are_noticed() -> None:
    """A gradient of exactly 0 with an eps that float32 does not have: 0 / 0."""
    module = torch.nn.Linear(2, 2)
    optimizer = MasterOptimizer(module, OptimizerSection(eps=1e-60), 9)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    report = optimizer.step(rows=[0])
    (found,) = optimizer.take_non_finite()
    assert report.non_finite and found.in_weights


@pytest.mark.parametrize("loss", [NAN, INF, -INF])
def test_a_loss_is_enough(loss: float) -> None:
    module = torch.nn.Linear(2, 2)
    before = module.weight.detach().clone()
    optimizer = MasterOptimizer(module, OptimizerSection(), 9)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    report = optimizer.step(loss=loss, rows=[1])
    assert report.non_finite and torch.equal(module.weight, before)
    assert module.weight.grad is None, "nor is it added to the next one"
    assert optimizer.step_count == 1, "the schedule goes on"


@pytest.mark.parametrize("value", [1e30, 3e38])
def test_large_weights_are_finite(value: float) -> None:
    module = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(module.weight, value)
    optimizer = MasterOptimizer(module, OptimizerSection(), 9)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert not optimizer.step().non_finite


@pytest.mark.parametrize("wrong", [NAN, INF, -INF])
def test_nothing_that_is_not_finite_is_stored_or_loaded(
    model_dir: Path, tmp_path: Path, wrong: float
) -> None:
    model = load_policy(model_dir, RUNTIME)
    with torch.no_grad():
        embedding(model)[3, 1] = wrong
    with pytest.raises(RunError, match="embed_tokens.weight.*not stored"):
        save_model(model, make_tiny_tokenizer(), tmp_path / "made")
    assert not (tmp_path / "made").exists()
    model.save_pretrained(tmp_path / "given")
    with pytest.raises(ResourceError, match="not finite.*embed_tokens.weight"):
        load_policy(tmp_path / "given", RUNTIME)


FOUND = NonFinite("the loss is nan", (1,))


def guard(warned: list[str], **fields: Any) -> FiniteGuard:
    return FiniteGuard("sft", OptimizerSection(**fields), warned.append)


def test_by_default_the_stage_ends_with_step_rows_and_what_to_try() -> None:
    warned: list[str] = []
    error = guard(warned).judge(7, [FOUND], [], ["a", "b"])
    assert isinstance(error, RunError) and not warned
    text = str(error)
    for part in ("sft: step 7", "the loss is nan", "1 of the 2 rows", "1 'b'", "learning_rate"):
        assert part in text
    assert "optimizer.non_finite: skip" in text and "nothing was stored" in text
    assert guard(warned).judge(7, [], [], ["a"]) is None


def test_skipped_steps_are_counted_over_the_stage_also_before_an_interruption() -> None:
    warned: list[str] = []
    judge = guard(warned, non_finite="skip", max_skipped=2).judge
    history = [{"step": 1.0, "grad/non_finite": 1.0}, {"step": 2.0}]
    assert judge(3, [FOUND], history, ["a", "b"]) is None
    assert "2 of at most 2" in warned[0] and "step 3" in warned[0]
    history.append({"step": 3.0, "grad/non_finite": 1.0})
    error = judge(4, [FOUND], history, ["a", "b"])
    assert error is not None and "above optimizer.max_skipped 2" in str(error)


def test_weights_that_are_not_finite_end_a_stage_that_skips() -> None:
    spoiled = NonFinite("weights are not finite after it", (0,), in_weights=True)
    error = guard([], non_finite="skip").judge(1, [FOUND, spoiled], [], ["a", "b"])
    assert error is not None and "optimizer.eps" in str(error)


def test_many_rows_are_shortened() -> None:
    many = NonFinite("the loss is nan", tuple(range(40)))
    text = str(guard([]).judge(1, [many], [], [f"key-{i}" for i in range(40)]))
    assert "all of the 40 rows" in text and "and 35 more" in text and "key-30" not in text


@pytest.mark.parametrize("metric", ["grad/non_finite", "value/non_finite"])
def test_an_rl_stage_ends_before_the_engine_gets_anything(metric: str) -> None:
    """The policy's optimizer and the critic's are judged by their own sections."""
    logged: list[tuple[int, dict[str, float]]] = []
    warned: list[str] = []
    context: Any = SimpleNamespace(
        name="rl", warn=warned.append, log_step=lambda step, found: logged.append((step, found))
    )
    skips = {"non_finite": "skip", "max_skipped": 1}
    critics = metric.startswith("value")
    stage = RlStage.model_validate(
        {
            "kind": "rl",
            "optimizer": {"learning_rate": 1e-5} | ({} if critics else skips),
            "critic": {"optimizer": {"learning_rate": 1e-4} | (skips if critics else {})},
        }
    )
    stored: Any = SimpleNamespace(stored=SimpleNamespace(take_non_finite=lambda: [FOUND]))
    problems = [Problem(key, "", "", "") for key in ("a", "b")]
    update: Any = SimpleNamespace(
        rollout=SimpleNamespace(step=3), batch=SimpleNamespace(problems=problems)
    )
    nothing: Any = None
    made = Recorder(context, stage, nothing, stored, stored, nothing, ())
    made.metrics = {metric: 1.0, "reward/mean": 0.5}
    made._require_finite(update)
    assert "step 3" in warned[0] and "1 'b'" in warned[0] and not logged
    made.history.append({metric: 1.0})
    section = "critic.optimizer" if critics else "optimizer"
    with pytest.raises(RunError, match=f"above {section}.max_skipped 1"):
        made._require_finite(update)
    assert logged == [(3, made.metrics)], "the metrics of the step that failed are recorded"
