"""The parts of an RL stage that its config may ask for, built from plugins and models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedModel

from posttrain.core.batch import RolloutBatch
from posttrain.core.config.rl_stage import LossTermComponent, RlStage
from posttrain.core.config.sections import OptimizerSection
from posttrain.core.contracts import Aggregator, KlEstimator, PolicyLoss, RolloutCorrection
from posttrain.core.data.examples import read_examples
from posttrain.core.data.problems import check_worked
from posttrain.core.data.tokenization import ChatTokenizer
from posttrain.core.models.loading import load_value_model
from posttrain.core.runtime.seeding import derive_seed
from posttrain.core.training.critic import Critic, CriticSettings
from posttrain.core.training.guard import KlGuard
from posttrain.core.training.natural_gradient import NaturalGradient
from posttrain.core.training.objective import LossTerm, Objective
from posttrain.core.training.optim import MasterOptimizer
from posttrain.core.training.ptx import PtxTerm
from posttrain.core.training.sft import worked_batch
from posttrain.core.training.updates import UpdateSettings
from posttrain.core.training.value_phase import ValuePhase
from posttrain.pipelines.stages.context import StageContext


def in_optimizer_steps(section: OptimizerSection, per_rollout: int) -> OptimizerSection:
    """The section with a warm-up given in rollout batches turned into optimizer steps."""
    if not section.warmup_rollouts:
        return section
    steps = section.warmup_rollouts * per_rollout
    return section.model_copy(update={"warmup_steps": steps, "warmup_rollouts": 0})


def build_objective(
    context: StageContext, stage: RlStage, kl: KlEstimator[Any] | None
) -> Objective:
    """Every term of the loss on the rollout; the pre-training term is the learner's own."""
    aggregator = context.build(Aggregator, stage.aggregator)
    entropy = stage.entropy_aggregator
    section = stage.rollout_correction
    corrects = section.plugin.name != "none" or bool(section.plugin.fields().get("reject"))
    terms = [build_term(context, stage, term) for term in stage.loss_terms]
    return Objective(
        terms=tuple(term for term in terms if term.loss.source == "rollout"),
        aggregator=aggregator,
        kl=kl,
        entropy_coef=stage.entropy_coef,
        entropy_aggregator=None if entropy is None else context.build(Aggregator, entropy),
        correction=context.build(RolloutCorrection, section.plugin) if corrects else None,
        bypass_old=section.bypass_old,
        renormalise=section.renormalise,
        top_entropy=stage.top_entropy,
    )


def build_term(context: StageContext, stage: RlStage, term: LossTermComponent) -> LossTerm:
    """One policy loss with its factor and the aggregator it is averaged by."""
    return LossTerm(
        loss=context.build(PolicyLoss, term),
        aggregator=context.build(Aggregator, term.aggregator or stage.aggregator),
        coef=term.coef,
    )


def build_ptx(context: StageContext, stage: RlStage, tokenizer: ChatTokenizer) -> PtxTerm | None:
    """The pre-training term, when the policy loss lists one."""
    terms = [build_term(context, stage, term) for term in stage.loss_terms]
    term = next((term for term in terms if term.loss.source == "ptx"), None)
    if term is None:
        return None
    section = stage.ptx
    if section.path is None:
        examples = context.training_problems(section.num_examples)
        check_worked(context.task, examples)
    else:
        examples = read_examples(section.path, f"stages.{context.name}.ptx.path")

    def make_batch(chosen: Sequence[int]) -> RolloutBatch:
        return worked_batch(tokenizer, [examples[i] for i in chosen])

    return PtxTerm(
        term=term,
        num_examples=len(examples),
        make_batch=make_batch,
        batch_size=section.batch_size,
        micro_batch_size=stage.micro_batch_size,
        seed=derive_seed(context.run.seed, context.name, "ptx"),
    )


def build_critic(context: StageContext, stage: RlStage) -> ValuePhase | None:
    """The value model with its optimizer, when the stage has one."""
    section = stage.critic
    if section is None:
        return None
    head: Literal["keep", "zero", "normal"]
    if section.init == "reward_model":
        source, head = context.inputs["reward_model"].path, "keep"
    elif section.init == "checkpoint":
        assert section.path is not None, "checked with the config"
        source, head = Path(section.path).expanduser(), "keep"
    else:
        source, head = context.model_dir, section.head
    seed = derive_seed(context.run.seed, context.name, "critic")
    model = load_value_model(source, context.runtime, head, seed=seed)
    per_batch = section.epochs * section.num_mini_batches
    optimizer = MasterOptimizer(
        model, in_optimizer_steps(section.optimizer, per_batch), stage.steps * per_batch
    )
    settings = CriticSettings(
        epochs=section.epochs,
        num_mini_batches=section.num_mini_batches,
        micro_batch_size=stage.micro_batch_size,
        max_tokens=stage.max_tokens_per_microbatch,
        clip=section.clip,
        huber_delta=section.huber_delta,
        aggregator=context.build(Aggregator, section.aggregator),
        seed=seed,
    )
    return ValuePhase(
        Critic(model, optimizer, settings),
        pretrain_steps=section.pretrain_steps,
        pretrain_slope=section.pretrain_slope,
    )


def build_guard(stage: RlStage) -> KlGuard | None:
    """The bound on how far one batch may move the policy."""
    section = stage.kl_guard
    return None if section is None else KlGuard(section.max_kl, section.action, section.factor)


def build_trust_region(
    context: StageContext, stage: RlStage, model: PreTrainedModel, settings: UpdateSettings
) -> NaturalGradient | None:
    """The optimizer of a loss that takes its own steps."""
    loss = context.build(PolicyLoss, stage.loss_terms[0])
    if not loss.owns_update:
        return None
    return NaturalGradient(model, loss.config, settings.temperature, settings.micro_batch_size)
