"""Stage `rl`: builds the loop from its plugins, runs the RL flow, saves model and curves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from posttrain.core.analysis.learning_curves import learning_curves
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.contracts import (
    AdvantageEstimator,
    KlController,
    KlEstimator,
    RolloutEngine,
    Sampler,
)
from posttrain.core.rollout.prompts import PromptStream
from posttrain.core.rollout.sync_check import SyncCheck, make_probe
from posttrain.core.runtime.seeding import derive_seed
from posttrain.core.training.checkpoint import load_checkpoint
from posttrain.core.types import Problem
from posttrain.pipelines.live import Live
from posttrain.pipelines.ranks.rl import on_ranks
from posttrain.pipelines.ranks.trainer import RankTrainer, wants_ranks
from posttrain.pipelines.rl_loop import RlLoop
from posttrain.pipelines.rollouts import Rollouts
from posttrain.pipelines.stages.context import StageContext, StageOutput
from posttrain.pipelines.stages.episodes import build_episodes
from posttrain.pipelines.stages.microscope import log_pages
from posttrain.pipelines.stages.rl_parts import build_critic, build_learner, keeps_products
from posttrain.pipelines.stages.rl_rewards import build_scorer
from posttrain.pipelines.stages.trained import save_trained


def run_rl(context: StageContext) -> StageOutput:
    """Train the input model with reinforcement learning; saves the result and the curves."""
    from posttrain.pipelines.rl import rl_flow  # a replay needs no Prefect

    with opened_loop(context) as loop:
        context.started(loop.stage.steps)
        rl_flow(context.name, Live(loop))
        loop.learner.stored.close()
        if loop.critic is not None:
            loop.critic.stored.close()
    save_trained(context, loop.learner.model, loop.tokenizer, "model")
    plots = learning_curves(
        loop.history, loop.evaluations, f"{context.run.name}: {context.name}", context.out / "plots"
    )
    for path in plots:
        context.tracker.log_file(path, "plots")
    log_pages(context)
    return StageOutput(
        {"model": context.out / "model", "report": context.out / "plots"},
        loop.metrics,
        resumed=context.resume_from is not None,
    )


@contextmanager
def opened_loop(context: StageContext) -> Iterator[RlLoop]:
    """The loop of the stage, standing at its first step or where its checkpoint stood."""
    stage = context.stage
    assert isinstance(stage, RlStage)
    with context.engines.lease(context.model_dir) as engine, ExitStack() as opened:
        ranks = opened.enter_context(RankTrainer(context)) if wants_ranks(context) else None
        loop = build_loop(context, stage, engine, ranks)
        loop.check_sync("the start of the stage")
        if loop.scorer.pool is not None:
            opened.enter_context(loop.scorer.pool)
        found = context.resume_from
        if found is not None:
            critic = None if loop.critic is None else loop.critic.stored
            learner = loop.learner
            state = load_checkpoint(
                found, learner.stored, critic=critic, reference=learner.reference
            )
            loop.resume(found, state)
        yield loop


def build_loop(
    context: StageContext,
    stage: RlStage,
    engine: RolloutEngine[Any],
    ranks: RankTrainer | None = None,
) -> RlLoop:
    """Load the models and build every plugin of the stage; with `ranks`, models are theirs.

    Over 60 lines by a little: it is the list of what a stage is made of, and decides nothing.
    """
    run = context.run
    tokenizer = context.tokenizer()
    episodes = build_episodes(context, stage.environment, tokenizer)
    problems = context.training_problems(stage.steps * stage.prompts_per_step)
    held_out = context.held_out_problems(run.evaluation)
    longest = max(stage.generation.max_response_length, run.evaluation.max_response_length)
    context.check_lengths(episodes or tokenizer, [*problems, *held_out], longest)
    kl = context.build(KlEstimator, stage.kl.estimator)
    controller = context.build(KlController, stage.kl.controller)

    def worked(problem: Problem) -> tuple[int, ...]:
        prompt = tokenizer.encode_prompt(problem)
        return (*prompt, *tokenizer.encode_response(problem.worked))

    learner, critic = (
        (build_learner(context, stage, tokenizer), build_critic(context, stage))
        if ranks is None
        else on_ranks(context, stage, ranks)
    )
    return RlLoop(
        context=context,
        stage=stage,
        learner=learner,
        engine=engine,
        tokenizer=tokenizer,
        rollouts=Rollouts(
            context=context,
            stage=stage,
            engine=engine,
            tokenizer=tokenizer,
            sampler=context.build(Sampler, stage.sampler),
            prompts=PromptStream(
                problems, episodes or tokenizer, derive_seed(run.seed, context.name, "prompts")
            ),
            episodes=episodes,
            keep_products=keeps_products(context, stage, learner, episodes is not None),
        ),
        scorer=build_scorer(context, stage, tokenizer),
        estimator=context.build(AdvantageEstimator, stage.advantage),
        kl=kl,
        controller=controller,
        episodes=episodes,
        held_out=held_out,
        critic=critic,
        sync_check=SyncCheck(
            engine,
            learner.model,
            make_probe(tokenizer, run.model.max_model_len, [worked(p) for p in problems[:2]]),
            stage.check_sync,
        ),
    )
