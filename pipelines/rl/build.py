"""The parts of an RL stage, built from its config, plugins and models."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from torch import Tensor
from transformers import PreTrainedModel

from posttrain.core.batch import RolloutBatch
from posttrain.core.config.distill_stage import RECORDED
from posttrain.core.config.rl_stage import (
    CriticSection,
    LossTermComponent,
    RlStage,
)
from posttrain.core.config.sections import OptimizerBase
from posttrain.core.contracts import (
    TEACHER_COLUMNS,
    AdvantageEstimator,
    Aggregator,
    DistillationLoss,
    EntropyController,
    KlController,
    KlEstimator,
    PolicyLoss,
    Reward,
    RewardContext,
    RolloutCorrection,
    RolloutEngine,
    TextLoss,
)
from posttrain.core.data.lengths import LengthRule, fitting_worked
from posttrain.core.data.problem_sets import check_worked, read_examples
from posttrain.core.data.token_bytes import Rereader, matched_tokens
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.data.vocabulary import check_vocabulary, logits_of, positions_of
from posttrain.core.math.nucleus import Cut
from posttrain.core.models.decoding import widest_window
from posttrain.core.models.loading import load_policy, load_value_model
from posttrain.core.models.sampled_outputs import (
    SampledOutputs,
    can_record,
    record_outputs,
    why_no_reuse,
)
from posttrain.core.models.stream_attention import STREAM
from posttrain.core.rewards.pool import RewardPool
from posttrain.core.rewards.scoring import Scorer
from posttrain.core.rewards.shaping import RewardShaping
from posttrain.core.rewards.weighted import weighted_rewards
from posttrain.core.runtime.seeding import derive_seed
from posttrain.core.training.critic import Critic, CriticSettings, ValueModel, ValuePhase
from posttrain.core.training.forward import check_passes
from posttrain.core.training.implicit_prm import ImplicitPrm, PrmSettings
from posttrain.core.training.learner import Learner
from posttrain.core.training.moving_reference import BiasCorrectedReference, MovingReference
from posttrain.core.training.natural_gradient import NaturalGradient
from posttrain.core.training.objective import DistillationTerm, LossTerm, Objective
from posttrain.core.training.optim import MasterOptimizer
from posttrain.core.training.sft import PtxTerm, worked_batch
from posttrain.core.training.teacher_contexts import TeacherContext
from posttrain.core.training.teacher_server import server_of
from posttrain.core.training.teacher_texts import TeacherReader
from posttrain.core.training.teachers import LocalTeacher, Routing, ScoresTokens, Teachers
from posttrain.core.training.updates import KlGuard, PolicyLearner, UpdateSettings
from posttrain.core.types import SamplingParams
from posttrain.pipelines.stage.inputs import StageInputs, StagePlugins
from posttrain.pipelines.stage.trained import build_optimizer, reference_of, start_training

logger = logging.getLogger(__name__)

OptimizerT = TypeVar("OptimizerT", bound=OptimizerBase)


def build_learner(context: StageInputs, stage: RlStage, tokenizer: ChatTokenizer) -> Learner:
    """The policy with its reference, objective and optimizer."""
    model = load_policy(context.model_dir, context.trained_runtime)
    # Not made when neither a KL term nor a loss will read it; before the adapter, which is not in
    # it.
    objective = build_objective(context, stage)
    wanted = wants_reference(context, stage, objective)
    moves = wanted and stage.kl.moves
    reference = reference_of(context, model, stage.lora, moves=moves) if wanted else None
    weights = {teacher.weights for teacher in stage.teachers.values()}
    average = reference_of(context, model, stage.lora, moves=True) if "ema" in weights else None
    base = None if moves else reference
    if base is None and "base" in weights:
        base = reference_of(context, model, stage.lora)
    start_training(context, model, stage.lora)
    settings = update_settings(context, stage)
    section = in_optimizer_steps(stage.optimizer, settings.updates_per_batch)
    optimizer = build_optimizer(
        context, model, section, stage.steps * settings.updates_per_batch, settings.seed
    )
    return Learner(
        model,
        optimizer,
        objective,
        settings,
        reference,
        moving=build_moving(stage, average or (reference if moves else None), optimizer),
        guard=build_guard(stage),
        ptx=build_ptx(context, stage, tokenizer),
        trust_region=build_trust_region(context, stage, model, settings),
        ranks=context.ranks,
        teachers=load_teachers(context, stage, {"live": model, "ema": average, "base": base}),
        matched=shared_tokens(context, stage),
    )


def load_teachers(
    context: StageInputs, stage: RlStage, own: Mapping[str, PreTrainedModel | None]
) -> dict[str, PreTrainedModel | None]:
    """The stage's teachers, frozen, in the order of the config; None for one behind a server.

    `own` are the policy's weights by the name that a teacher has them by. Raises `ResourceError`
    for one of another vocabulary than the policy's, unless the stage learns from texts.
    """
    found: dict[str, PreTrainedModel | None] = {}
    if stage.learns_from_record:
        return {RECORDED: None}
    for name, section in stage.teachers.items():
        found[name] = None if section.weights is None else own[section.weights]
        if section.base_url is not None or section.policy is not None:
            continue
        folder = teacher_folder(context, stage, name)
        if not learns_texts(context, stage):
            check_vocabulary(context.model_dir, folder, f"stages.{context.name}: teacher '{name}'")
        teacher = load_policy(folder, context.runtime)
        teacher.requires_grad_(False)
        check_passes(teacher)
        context.place(teacher)
        found[name] = teacher
    return found


def teacher_folder(context: StageInputs, stage: RlStage, name: str) -> Path:
    """Where the weights of the teacher `name` are."""
    folder = stage.teachers[name].folder
    return context.inputs[name].path if folder is None else Path(folder).expanduser()


def learns_texts(context: StagePlugins, stage: RlStage) -> bool:
    """Whether its teachers may have tokenizers of their own."""
    section = stage.distillation
    return section is not None and isinstance(context.build(DistillationLoss, section), TextLoss)


def readers_of(context: StageInputs, stage: RlStage) -> dict[str, TeacherReader]:
    """How each teacher reads what the policy wrote, if the stage learns from texts.

    Raises `ResourceError` for a tokenizer whose tokens' bytes are not known.
    """
    if not learns_texts(context, stage):
        return {}
    own, found = context.tokenizer(), {}
    for name in stage.teachers:
        folder = teacher_folder(context, stage, name)
        theirs = ChatTokenizer.load(folder, context.run.model.system_prompt)
        longest = positions_of(folder) or context.run.model.max_model_len
        found[name] = TeacherReader(Rereader.of(own, theirs), longest)
    return found


def shared_tokens(context: StageInputs, stage: RlStage) -> dict[str, Tensor]:
    """The tokens [M, 2] for which both the policy and a teacher have a logit, by its name."""
    found = {}
    for name, each in readers_of(context, stage).items():
        pairs = matched_tokens(each.reader.own, each.reader.other)
        for side, folder in enumerate((context.model_dir, teacher_folder(context, stage, name))):
            if (size := logits_of(folder)) is not None:
                pairs = pairs[pairs[:, side] < size]
        found[name] = pairs
    return found


def build_teachers(context: StageInputs, stage: RlStage) -> Teachers | None:
    """The stage's teachers with how problems are routed to them; None if it has none."""
    if not stage.teachers:
        return None
    distillation, top_k = stage.distillation, 0
    if distillation is not None:
        top_k = context.build(DistillationLoss, distillation).num_candidates()
    longest = context.run.model.max_model_len
    scorers: dict[str, ScoresTokens] = {}
    for name, section in stage.teachers.items():
        if section.base_url is None:
            scorers[name] = LocalTeacher(name)
            continue
        server = server_of(name, section)
        server.check(context.tokenizer(), top_k=top_k, longest=longest)
        scorers[name] = server
    contexts = {
        name: TeacherContext(
            context.tokenizer(),
            own.template,
            own.context,
            longest,
            own.field or "",
            own.min_reward,
        )
        for name, section in stage.teachers.items()
        if (own := section.policy) is not None
    }
    return Teachers(
        scorers,
        routing_of(stage),
        top_k=top_k,
        on_missing=stage.teacher_missing,
        contexts=contexts,
        readers=tuple(readers_of(context, stage).values()),
    )


def routing_of(stage: RlStage) -> Routing | None:
    """Which teacher judges which problem, where there are several."""
    section = stage.teacher_routing
    if section is None:
        return None
    routes = {
        route: index
        for index, (name, teacher) in enumerate(stage.teachers.items())
        for route in teacher.routes or (name,)
    }
    return Routing(section.by, routes, section.unknown)


def wants_reference(context: StagePlugins, stage: RlStage, objective: Objective) -> bool:
    """Whether a KL term, a loss or a process reward model reads a reference policy."""
    coefficient = context.build(KlController, stage.kl.controller).coefficient()
    read = "ref_logprobs" in objective.required_columns() or stage.implicit_prm is not None
    return coefficient > 0 or read


def build_moving(
    stage: RlStage, reference: PreTrainedModel | None, optimizer: MasterOptimizer
) -> MovingReference | None:
    """What moves `reference`: the stage's own, or a teacher that follows the policy."""
    if reference is None:
        return None
    for teacher in stage.teachers.values():
        if teacher.policy is not None and teacher.policy.weights == "ema":
            return MovingReference(reference, optimizer, rate=teacher.policy.ema_rate, every=1)
    rule = stage.kl.ref_update
    if rule is None:
        return MovingReference(reference, optimizer)
    if rule.rule == "bema":
        return BiasCorrectedReference(reference, optimizer, every=rule.resolved_every)
    return MovingReference(reference, optimizer, rate=rule.resolved_rate, every=rule.resolved_every)


def output_recording(
    context: StageInputs, stage: RlStage, engine: RolloutEngine[Any], learner: PolicyLearner
) -> Callable[[], AbstractContextManager[SampledOutputs | None]]:
    """Records the engine's linear outputs while it samples, if the stage reuses them."""
    model = learner.model
    reason = why_no_reuse(
        context.run,
        stage,
        recordable=can_record(engine),
        streams=model.config._attn_implementation == STREAM,
        window=widest_window(model),
        corrects=learner.objective.correction is not None,
        owns_update=learner.objective.owns_update,
    )
    if reason is not None:
        logger.info("the update computes all linear outputs itself: %s", reason)
        return nullcontext
    return partial(record_outputs, engine, model, learner.reference)


def update_settings(
    context: StageInputs, stage: RlStage, step: int | None = None
) -> UpdateSettings:
    """How the stage cuts up a rollout batch: of steps to come, or of a past `step`."""
    seed = context.draw_seed if step is None else context.drew_with(step)
    return UpdateSettings(
        epochs=stage.epochs,
        num_mini_batches=stage.num_mini_batches,
        micro_batch_size=stage.micro_batch_size,
        max_tokens=stage.max_tokens_per_microbatch,
        skip_idle_rows=stage.skip_idle_rows,
        token_weights=stage.token_weights,
        temperature=stage.generation.temperature,
        seed=derive_seed(seed, context.name, "learner"),
        cut=Cut(stage.generation.top_k, stage.generation.top_p),
    )


def sampling_of(stage: RlStage, seed: int) -> SamplingParams:
    """How the stage's responses are drawn."""
    generation = stage.generation
    return SamplingParams(
        num_generations=stage.num_generations,
        max_tokens=generation.max_response_length,
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k,
        seed=seed,
    )


def in_optimizer_steps(section: OptimizerT, per_rollout: int) -> OptimizerT:
    """The section with a warm-up given in rollout batches turned into optimizer steps."""
    if not section.warmup_rollouts:
        return section
    steps = section.warmup_rollouts * per_rollout
    return section.model_copy(update={"warmup_steps": steps, "warmup_rollouts": 0})


def build_objective(context: StagePlugins, stage: RlStage) -> Objective:
    """Every term of the loss on the rollout; the pre-training term is the learner's own."""
    kl = context.build(KlEstimator, stage.kl.estimator) if stage.kl.place == "loss" else None
    aggregator = context.build(Aggregator, stage.aggregator)
    entropy, controller = stage.entropy_aggregator, stage.entropy_controller
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
        entropy_controller=(
            None if controller is None else context.build(EntropyController, controller)
        ),
        observed=next((term for term in terms if term.loss.source == "observations"), None),
        distillation=build_distillation(context, stage),
        taught_advantages=only_taught(context, stage),
    )


def only_taught(context: StagePlugins, stage: RlStage) -> bool:
    """Whether all advantages are what teachers say."""
    return bool(stage.transforms) and context.build(AdvantageEstimator, stage.advantage).is_zero


def build_distillation(context: StagePlugins, stage: RlStage) -> DistillationTerm | None:
    """The divergence from a teacher as a term, if the stage has one."""
    section = stage.distillation
    if section is None:
        return None
    aggregator = context.build(Aggregator, section.aggregator or stage.aggregator)
    loss = context.build(DistillationLoss, section)
    return DistillationTerm(loss, aggregator, section.coef, num_teachers=balanced_teachers(stage))


def balanced_teachers(stage: RlStage) -> int:
    """The number of teachers that count alike; 0 where each counts by what it judges."""
    routing = stage.teacher_routing
    return len(stage.teachers) if routing is not None and routing.balance == "equal" else 0


def build_term(context: StagePlugins, stage: RlStage, term: LossTermComponent) -> LossTerm:
    """One policy loss with its factor and the aggregator it is averaged by."""
    loss, taught = context.build(PolicyLoss, term), only_taught(context, stage)
    from_teachers = TEACHER_COLUMNS | ({"advantages"} if taught else frozenset())
    reads_teachers = bool(loss.required_columns() & from_teachers)
    return LossTerm(
        loss=loss,
        aggregator=context.build(Aggregator, term.aggregator or stage.aggregator),
        coef=term.coef,
        rest_of=next((other for other in stage.complements if other is not term.coef), None),
        num_teachers=balanced_teachers(stage) if reads_teachers else 0,
    )


def build_ptx(context: StageInputs, stage: RlStage, tokenizer: ChatTokenizer) -> PtxTerm | None:
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
    rule = LengthRule.of(context.run.model, "examples of the term ptx")
    examples = fitting_worked(tokenizer, examples, rule)
    context.report_lengths(rule, "ptx")
    limit = context.run.model.max_model_len

    def make_batch(chosen: Sequence[int]) -> RolloutBatch:
        return worked_batch(tokenizer, [examples[i] for i in chosen], limit)

    return PtxTerm(
        term=term,
        num_examples=len(examples),
        make_batch=make_batch,
        batch_size=section.batch_size,
        micro_batch_size=stage.micro_batch_size,
        seed=derive_seed(context.draw_seed, context.name, "ptx"),
    )


def build_critic(context: StageInputs, stage: RlStage) -> Critic | None:
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
    model = load_value_model(source, context.trained_runtime, head, seed=seed)
    start_training(context, model, section.lora, "critic")
    per_batch = section.epochs * section.num_mini_batches
    used = in_optimizer_steps(section.optimizer, per_batch)
    optimizer = build_optimizer(context, model, used, stage.steps * per_batch, seed)
    return Critic(model, optimizer, critic_settings(context, stage), context.ranks)


def critic_settings(context: StageInputs, stage: RlStage) -> CriticSettings:
    """How the stage's critic is trained."""
    section = stage.critic
    assert section is not None
    return CriticSettings(
        epochs=section.epochs,
        num_mini_batches=section.num_mini_batches,
        micro_batch_size=stage.micro_batch_size,
        max_tokens=stage.max_tokens_per_microbatch,
        clip=section.clip,
        huber_delta=section.huber_delta,
        aggregator=context.build(Aggregator, section.aggregator),
        seed=derive_seed(context.draw_seed, context.name, "critic"),
    )


def build_prm(context: StageInputs, stage: RlStage) -> ImplicitPrm | None:
    """The implicit process reward model with its optimizer, when the stage has one."""
    section = stage.implicit_prm
    if section is None:
        return None
    seed = derive_seed(context.draw_seed, context.name, "implicit_prm")
    model = load_policy(context.model_dir, context.trained_runtime)
    start_training(context, model, section.lora, "implicit_prm")
    per_batch = section.epochs * section.num_mini_batches
    used = in_optimizer_steps(section.optimizer, per_batch)
    optimizer = build_optimizer(context, model, used, stage.steps * per_batch, seed)
    settings = PrmSettings(
        beta=section.beta,
        epochs=section.epochs,
        num_mini_batches=section.num_mini_batches,
        micro_batch_size=stage.micro_batch_size,
        max_tokens=stage.max_tokens_per_microbatch,
        temperature=stage.generation.temperature,
        seed=seed,
    )
    return ImplicitPrm(model, optimizer, settings, context.ranks)


def value_phase(critic: ValueModel | None, section: CriticSection | None) -> ValuePhase | None:
    """The critic with its head start, when the stage has one."""
    if critic is None or section is None:
        return None
    return ValuePhase(
        critic, pretrain_steps=section.pretrain_steps, pretrain_slope=section.pretrain_slope
    )


def build_guard(stage: RlStage) -> KlGuard | None:
    """The bound on how far one batch may move the policy."""
    section = stage.kl_guard
    return None if section is None else KlGuard(section.max_kl, section.action, section.factor)


def build_trust_region(
    context: StageInputs, stage: RlStage, model: PreTrainedModel, settings: UpdateSettings
) -> NaturalGradient | None:
    """The optimizer of a loss that takes its own steps."""
    if not stage.loss_terms:
        return None
    loss = context.build(PolicyLoss, stage.loss_terms[0])
    if not loss.owns_update:
        return None
    return NaturalGradient(model, loss.config, settings.temperature, settings.micro_batch_size)


def build_scorer(context: StageInputs, stage: RlStage, tokenizer: ChatTokenizer) -> Scorer:
    """The rewards with their weights, shaping and, if they need one, their pool."""
    setup = RewardContext(
        inputs={role: artifact.path for role, artifact in context.inputs.items()},
        dtype=context.runtime.dtype,
        device=context.runtime.device,
        attention=context.runtime.attention,
        batch_size=stage.micro_batch_size,
    )
    weighted = weighted_rewards(stage.rewards, partial(context.build, Reward))
    rewards = [each.reward for each in weighted]
    for reward in rewards:
        if reward.runs_in == "host":
            reward.setup(setup)
    return Scorer(
        task=context.task,
        rewards=weighted,
        tokenizer=tokenizer,
        clip=stage.reward_clip,
        on_missing=stage.on_missing,
        max_failure_rate=stage.reward_pool.max_failure_rate,
        pool=_pool(context, stage, [r for r in rewards if r.runs_in == "worker"], setup),
        shaping=RewardShaping(
            stage.overlong_filter, stage.reward_whiten, keep_mean=stage.reward_keep_mean
        ),
    )


def _pool(
    context: StageInputs, stage: RlStage, rewards: Sequence[Reward[Any]], setup: RewardContext
) -> RewardPool | None:
    """A pool for the rewards that run in worker processes; None when there are none."""
    if not rewards:
        return None
    return RewardPool(
        rewards,
        workers=stage.reward_pool.workers,
        timeout_s=stage.reward_pool.timeout_s,
        context=setup,
        check=context.check,
    )
