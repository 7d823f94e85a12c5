"""Stage `rl`: builds the loop from its plugins, runs the RL flow, saves model and curves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from posttrain.core.analysis.dashboard import about_stage, write_dashboard
from posttrain.core.analysis.learning_curves import learning_curves
from posttrain.core.analysis.mlflow_view import rl_view
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.contracts import (
    AdvantageEstimator,
    AdvantageTransform,
    KlController,
    KlEstimator,
    PromptGroup,
    RolloutEngine,
    Sampler,
    StageOutput,
)
from posttrain.core.data.problem_sets import check_worked
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.rewards.checking import unreadable_references
from posttrain.core.rollout.episode_log import FOLDER, EpisodeLog
from posttrain.core.rollout.plays import Plays
from posttrain.core.rollout.prompts import PromptStream
from posttrain.core.rollout.streaming import GroupStream
from posttrain.core.rollout.submitting import STRETCH_TOKENS, Submitting
from posttrain.core.runtime.locks import SharedLock
from posttrain.core.runtime.seeding import derive_seed
from posttrain.core.tracking import shared_view
from posttrain.core.training.columns import ColumnFiller
from posttrain.core.training.critic import ValueModel
from posttrain.core.training.implicit_prm import ProcessRewards
from posttrain.core.training.sync_check import SyncCheck, make_probe
from posttrain.core.training.updates import PolicyLearner
from posttrain.core.types import Problem
from posttrain.pipelines.ranks.rl import on_ranks
from posttrain.pipelines.ranks.trainer import RankTrainer, wants_ranks
from posttrain.pipelines.rl.build import (
    build_critic,
    build_learner,
    build_prm,
    output_recording,
    sampling_of,
    value_phase,
)
from posttrain.pipelines.rl.given_answers import (
    GivenAnswers,
    RecordedAnswers,
    kept_by,
    open_given,
)
from posttrain.pipelines.rl.recording import Recorder
from posttrain.pipelines.rl.rollouts import Rollouts
from posttrain.pipelines.rl.scorer import build_scorer
from posttrain.pipelines.rl.step import RlLoop
from posttrain.pipelines.rl.teachers import build_teachers
from posttrain.pipelines.stage.context import StageContext
from posttrain.pipelines.stage.inputs import Episodes, episodes_of, played_one_by_one
from posttrain.pipelines.stage.on_nodes import answered_on_nodes, scored_on_nodes
from posttrain.pipelines.stage.trained import save_trained
from posttrain.pipelines.stages.microscope import log_pages


def run_rl(context: StageContext) -> StageOutput:
    """Train the input model with reinforcement learning; saves the result and the curves."""
    from posttrain.pipelines.rl.flow import run_steps  # a replay needs no Prefect

    with opened_loop(context) as loop:
        context.started(loop.stage.steps)
        view = rl_view(loop.stage, loop.recorder.reward_names)
        context.tracker.share_view(shared_view.name_of(loop.stage.kind), view)
        run_steps(context.name, loop)
        model = loop.learner.model  # before ranks end that trained it
        loop.learner.stored.close()
        for other in (loop.critic, loop.prm):
            if other is not None:
                other.stored.close()
    save_trained(context, model, loop.tokenizer, "model")
    title, record = f"{context.run.name}: {context.name}", loop.recorder
    plots = learning_curves(record.history, record.evaluations, title, context.out / "plots")
    about = about_stage(loop.stage, loop.stage.steps)
    plots.append(
        write_dashboard(record.history, record.raised(), title, about, context.out / "plots")
    )
    for path in plots:
        context.tracker.log_file(path, "plots")
    log_pages(context)
    return StageOutput(
        {"model": context.out / "model", "report": context.out / "plots"},
        record.metrics,
        resumed=context.resume_from is not None,
    )


@contextmanager
def opened_loop(context: StageContext) -> Iterator[RlLoop]:
    """The loop of the stage, standing at its first step or where its checkpoint stood."""
    stage = context.stage
    assert isinstance(stage, RlStage)
    with context.engines.lease(context.model_dir) as engine, ExitStack() as opened:
        ranks = opened.enter_context(RankTrainer(context)) if wants_ranks(context) else None
        tokenizer = context.tokenizer()
        episodes = opened.enter_context(
            episodes_of(context, stage.environment, tokenizer, context.check)
        )
        given = open_given(context, stage, tokenizer, opened)
        loop = build_loop(context, stage, engine, tokenizer, episodes, ranks, given)
        opened.callback(loop.rollouts.close)
        loop.check_sync("the start of the stage")
        opened.enter_context(scored_on_nodes(context, loop.scorer))
        opened.enter_context(answered_on_nodes(context, loop.episodes))
        if context.resume_from is not None:
            loop.resume(context.resume_from)
        yield loop


def episode_log(
    context: StageContext,
    stage: RlStage,
    episodes: Episodes | None,
    given: GivenAnswers | None,
) -> EpisodeLog | None:
    """Where samples are kept that cannot be drawn a second time."""
    repeatable = not kept_by(given, stage)
    repeatable = repeatable and (not isinstance(episodes, Plays) or episodes.repeatable)
    if stage.schedule != "streaming" and repeatable:
        return None
    return EpisodeLog(context.checkpoints / FOLDER, context.warn)


def recorded_prompts(
    context: StageContext, given: GivenAnswers | None
) -> Sequence[PromptGroup] | None:
    """The prompts of a record, which are the stage's only ones; None without a record."""
    if given is None or not isinstance(given.source, RecordedAnswers):
        return None
    prompts = given.source.record.prompts
    context.record_dataset("train", [prompt.problem for prompt in prompts])
    return prompts


def build_stream(
    context: StageContext,
    stage: RlStage,
    engine: RolloutEngine[Any],
    tokenizer: ChatTokenizer,
    episodes: Episodes | None,
    prompts: PromptStream,
    use: SharedLock,
) -> GroupStream | None:
    """What samples while the policy is trained, if the stage streams."""
    if stage.schedule != "streaming":
        return None
    plays = played_one_by_one(context, stage, tokenizer, episodes)
    seed = derive_seed(context.draw_seed, context.name, "rollout")
    most = stage.prompts_per_step * (1 + stage.max_staleness)
    stretch = stage.stretch_tokens or STRETCH_TOKENS
    submitting = Submitting(engine, stretch, use.together)
    return GroupStream(plays, submitting, prompts.at, sampling_of(stage, seed), most)


def build_loop(
    context: StageContext,
    stage: RlStage,
    engine: RolloutEngine[Any],
    tokenizer: ChatTokenizer,
    episodes: Episodes | None,
    ranks: RankTrainer | None = None,
    given: GivenAnswers | None = None,
) -> RlLoop:
    """Load the models and build every plugin of the stage; with `ranks`, models are theirs.

    `given` are answers that others than the policy have.
    """
    run, prompts = context.run, recorded_prompts(context, given)
    held_out = context.held_out_problems(run.evaluation)
    encoder, longest = episodes or tokenizer, stage.generation.max_response_length
    if prompts is None:
        problems = context.training_problems(stage.steps * stage.prompts_per_step)
        if given is not None and not stage.seq_kd:
            check_worked(context.task, problems)
        prompts = context.encode_prompts(encoder, problems, longest, "data")
    else:
        problems = [prompt.problem for prompt in prompts]
    unseen = context.encode_prompts(encoder, held_out, run.evaluation.max_response_length, "eval")
    controller = context.build(KlController, stage.kl.controller)

    def worked(problem: Problem) -> tuple[int, ...]:
        prompt = tokenizer.encode_prompt(problem)
        return (*prompt, *tokenizer.encode_response(problem.worked))  # for a probe any text will do

    learner: PolicyLearner
    model: ValueModel | None
    prm: ProcessRewards | None
    if ranks is None:
        learner, model = build_learner(context, stage, tokenizer), build_critic(context, stage)
        prm = build_prm(context, stage)
    else:
        learner, model, prm = on_ranks(context, stage, ranks)
    critic = value_phase(model, stage.critic)
    scorer = build_scorer(context, stage, tokenizer)
    order, use = PromptStream(prompts, derive_seed(run.seed, context.name, "prompts")), SharedLock()
    stream = build_stream(context, stage, engine, tokenizer, episodes, order, use)
    for sentence in unreadable_references(scorer.rewards, problems):
        context.warn(f"{context.name}: {sentence}")
    return RlLoop(
        context=context,
        stage=stage,
        learner=learner,
        columns=ColumnFiller(learner, build_teachers(context, stage)),
        engine=engine,
        tokenizer=tokenizer,
        rollouts=Rollouts(
            context=context,
            stage=stage,
            engine=engine,
            tokenizer=tokenizer,
            sampler=context.build(Sampler, stage.sampler),
            prompts=order,
            episodes=episodes,
            recording=output_recording(context, stage, engine, learner),
            log=episode_log(context, stage, episodes, given),
            stream=stream,
            engine_use=use,
            given=given,
        ),
        scorer=scorer,
        estimator=context.build(AdvantageEstimator, stage.advantage),
        transforms=[context.build(AdvantageTransform, each) for each in stage.transforms],
        kl=context.build(KlEstimator, stage.kl.estimator),
        controller=controller,
        episodes=episodes,
        held_out=unseen,
        recorder=Recorder(
            context,
            stage,
            tokenizer,
            learner,
            critic,
            controller,
            reward_names=scorer.names,
            prm=prm,
        ),
        checkpoints=context.keeper(stage.steps, stage.checkpoint_every),
        critic=critic,
        prm=prm,
        sync_check=SyncCheck(
            engine,
            learner.model,
            make_probe(tokenizer, run.model.max_model_len, [worked(p) for p in problems[:2]]),
            stage.check_sync,
            learner.source if engine.fetches_weights else None,
        ),
    )
