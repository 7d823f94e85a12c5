"""The trainer of each kind of stage: its model, its optimizers, and what may be called on it.

All of it runs on every rank alike. Names of methods are those that `pipelines.ranks` calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from posttrain.core.batch import RolloutBatch
from posttrain.core.config.base import StageBase
from posttrain.core.config.distill_stage import DistillStage
from posttrain.core.config.preference_stages import (
    PreferenceStage,
    ProcessRewardModelStage,
    RewardModelStage,
)
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.config.sft_stage import SftStage
from posttrain.core.contracts import PairLoss, PreferenceLoss
from posttrain.core.data.preference import Pair
from posttrain.core.data.steps import StepRow
from posttrain.core.models.loading import load_policy, load_reward_model
from posttrain.core.runtime.seeding import derive_seed
from posttrain.core.training.forward import forward_only
from posttrain.core.training.moving_reference import MovingReference
from posttrain.core.training.optim import MasterOptimizer
from posttrain.core.training.preference import PreferenceLearner, Rows
from posttrain.core.training.preference_objective import (
    PreferenceObjective,
    PreferenceTerm,
    Scoring,
)
from posttrain.core.training.process_reward import StepRanking, process_step, rank_steps
from posttrain.core.training.readings import StepReadings
from posttrain.core.training.reward_model import pairs_in_order, reward_step
from posttrain.core.training.sft import negative_log_likelihood, sft_step
from posttrain.core.training.updates import UpdateResult
from posttrain.pipelines.rl.build import build_critic, build_learner, build_prm
from posttrain.pipelines.stage.inputs import StageInputs
from posttrain.pipelines.stage.trained import build_optimizer, reference_of, start_training

Methods = Mapping[str, Callable[..., Any]]  # Any: each method has its own arguments
ONLY = "model"
"""The optimizer of a stage that trains one model."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A stage's trainer. `model` is what the stage makes."""

    model: PreTrainedModel
    optimizers: Mapping[str, MasterOptimizer | MovingReference]
    methods: Methods


def rl(inputs: StageInputs) -> Trained:
    """The learner of an `rl` stage and, if it has them, critic and process reward model."""
    stage = inputs.stage
    assert isinstance(stage, RlStage)
    learner = build_learner(inputs, stage, inputs.tokenizer())
    critic, prm = build_critic(inputs, stage), build_prm(inputs, stage)
    optimizers: dict[str, MasterOptimizer | MovingReference] = {"policy": learner.optimizer}
    if learner.moving is not None:
        optimizers["reference"] = learner.moving

    def update(
        batch: RolloutBatch, step: int, kl_coef: float, states: Mapping[str, dict[str, float]]
    ) -> tuple[UpdateResult, dict[str, dict[str, float]]]:
        parts = learner.objective.stateful()
        for name, part in parts.items():
            part.load_state(states[name])
        result = learner.update(batch, step, kl_coef)
        return result, {name: part.state() for name, part in parts.items()}

    def probe(batch: RolloutBatch) -> Tensor:
        return forward_only(learner.model, batch, len(batch), 1.0).logprobs

    methods: dict[str, Callable[..., Any]] = {
        "update": update,
        "probe": probe,
        "policy": learner.policy_pass,
        "reference": learner.reference_logprobs,
        "teacher": learner.teacher_pass,
        "sum_pi_squared": learner.sum_pi_squared,
        "refresh_reference": learner.refresh_reference,
    }
    if critic is not None:
        optimizers["critic"] = critic.optimizer
        methods |= {"values": critic.values, "update_critic": critic.update}
    if prm is not None:
        optimizers["implicit_prm"] = prm.optimizer
        methods |= {"process_rewards": prm.rewards, "update_prm": prm.update}
    return Trained(learner.model, optimizers, methods)


def policy_model(inputs: StageInputs) -> PreTrainedModel:
    """The policy that an `sft` or `preference` stage starts from."""
    assert isinstance(inputs.stage, SftStage | PreferenceStage)
    model = load_policy(inputs.model_dir, inputs.trained_runtime)
    start_training(inputs, model, inputs.stage.lora)
    return model


def reward_head(inputs: StageInputs) -> PreTrainedModel:
    """The model with a new head that a stage of (process) reward models starts from."""
    assert isinstance(inputs.stage, RewardModelStage | ProcessRewardModelStage)
    model = load_reward_model(inputs.model_dir, inputs.trained_runtime, new_head=True)
    start_training(inputs, model, inputs.stage.lora)
    return model


def sft(inputs: StageInputs, num_steps: int) -> Trained:
    """Supervised steps on batches of rows, and the likelihood of rows that are not trained on."""
    stage = inputs.stage
    assert isinstance(stage, SftStage)
    model = policy_model(inputs)
    optimizer = build_optimizer(inputs, model, stage.optimizer, num_steps, _seed(inputs))
    size, check, ranks = stage.micro_batch_size, inputs.check, inputs.ranks

    def step(batch: RolloutBatch, readings: StepReadings | None) -> dict[str, float]:
        return sft_step(
            model,
            optimizer,
            batch,
            micro_batch_size=size,
            weighting=stage.weighting,
            check=check,
            ranks=ranks,
            readings=readings,
        )

    def likelihood(batch: RolloutBatch) -> tuple[float, float]:
        return negative_log_likelihood(
            model, batch, micro_batch_size=size, check=check, ranks=ranks
        )

    return Trained(model, {ONLY: optimizer}, {"step": _read(step), "likelihood": likelihood})


def reward_model(inputs: StageInputs, num_steps: int) -> Trained:
    """Steps on pairs, and how many pairs are ordered rightly."""
    stage = inputs.stage
    assert isinstance(stage, RewardModelStage)
    model = reward_head(inputs)
    optimizer = build_optimizer(inputs, model, stage.optimizer, num_steps, _seed(inputs))
    loss = inputs.build(PairLoss, stage.preference_loss)
    size, check, ranks = stage.micro_batch_size, inputs.check, inputs.ranks

    def step(pairs: Sequence[Pair], readings: StepReadings | None) -> dict[str, float]:
        return reward_step(
            model,
            optimizer,
            pairs,
            loss,
            micro_batch_size=size,
            check=check,
            ranks=ranks,
            readings=readings,
        )

    def in_order(pairs: Sequence[Pair]) -> list[bool]:
        return pairs_in_order(model, pairs, size, check, ranks)

    return Trained(model, {ONLY: optimizer}, {"step": _read(step), "in_order": in_order})


def process_reward_model(inputs: StageInputs, num_steps: int) -> Trained:
    """Steps on answers with labelled steps, and how unseen ones are ranked."""
    stage = inputs.stage
    assert isinstance(stage, ProcessRewardModelStage)
    model = reward_head(inputs)
    optimizer = build_optimizer(inputs, model, stage.optimizer, num_steps, _seed(inputs))
    size, check, ranks = stage.micro_batch_size, inputs.check, inputs.ranks

    def step(rows: Sequence[StepRow], readings: StepReadings | None) -> dict[str, float]:
        return process_step(
            model,
            optimizer,
            rows,
            micro_batch_size=size,
            check=check,
            ranks=ranks,
            readings=readings,
        )

    def rank(rows: Sequence[StepRow]) -> StepRanking:
        return rank_steps(model, rows, size, check, ranks)

    return Trained(model, {ONLY: optimizer}, {"step": _read(step), "rank": rank})


def preference(inputs: StageInputs, num_steps: int) -> Trained:
    """Steps on pairs or labelled answers, and how the policy ranks unseen ones."""
    stage = inputs.stage
    assert isinstance(stage, PreferenceStage)
    objective = preference_objective(inputs, stage)
    model = load_policy(inputs.model_dir, inputs.trained_runtime)
    reference = reference_of(inputs, model, stage.lora) if objective.needs_reference else None
    start_training(inputs, model, stage.lora)
    learner = PreferenceLearner(
        model=model,
        objective=objective,
        pad_token_id=inputs.tokenizer().pad_token_id,
        micro_batch_size=stage.micro_batch_size,
        reference=reference,
        check=inputs.check,
        ranks=inputs.ranks,
    )
    optimizer = build_optimizer(inputs, model, stage.optimizer, num_steps, _seed(inputs))

    def step(rows: Rows, readings: StepReadings | None) -> dict[str, float]:
        return learner.step(rows, optimizer, readings)

    return Trained(model, {ONLY: optimizer}, {"step": _read(step), "rank": learner.rank})


def _read(step: Callable[[Any, StepReadings | None], dict[str, float]]) -> Callable[..., Any]:
    """The method `step` of a stage on given answers, which returns what it was computed from too.

    That is None unless it is asked to keep it.
    """

    def called(rows: Any, keep: bool) -> tuple[dict[str, float], StepReadings | None]:
        readings = StepReadings() if keep else None
        return step(rows, readings), readings

    return called


def _seed(inputs: StageInputs) -> int:
    """Of the optimizer's rounding at random."""
    return derive_seed(inputs.draw_seed, inputs.name)


def preference_objective(inputs: StageInputs, stage: PreferenceStage) -> PreferenceObjective:
    """The stage's losses and how their scores are made."""
    scoring = Scoring(
        f_divergence=stage.f_divergence,
        alpha=stage.f_alpha,
        ld_alpha=stage.ld_alpha,
        wpo=stage.wpo,
    )
    terms = tuple(
        PreferenceTerm(inputs.build(PreferenceLoss, term), term.coef) for term in stage.loss_terms
    )
    return PreferenceObjective(terms, scoring, stage.reference_free)


BUILDERS: dict[type[StageBase], Callable[..., Trained]] = {
    RlStage: rl,
    DistillStage: rl,
    SftStage: sft,
    RewardModelStage: reward_model,
    ProcessRewardModelStage: process_reward_model,
    PreferenceStage: preference,
}
UNTRAINED: dict[type[StageBase], Callable[[StageInputs], PreTrainedModel]] = {
    SftStage: policy_model,
    RewardModelStage: reward_head,
    ProcessRewardModelStage: reward_head,
    PreferenceStage: policy_model,
}
"""The model as it is before the first step, without optimizer or reference."""
