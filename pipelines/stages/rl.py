"""Stage `rl`: builds the loop from its plugins, runs the RL flow, saves model and curves."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from transformers import PreTrainedModel

from posttrain.core.config.rl_stage import RlStage
from posttrain.core.contracts import (
    AdvantageEstimator,
    KlController,
    KlEstimator,
    RolloutEngine,
    Sampler,
)
from posttrain.core.math.nucleus import Cut
from posttrain.core.models.loading import load_policy, save_model
from posttrain.core.rollout.prompts import PromptStream
from posttrain.core.rollout.sync_check import SyncCheck, make_probe
from posttrain.core.runtime.seeding import derive_seed
from posttrain.core.tracking.plots import learning_curves
from posttrain.core.training.checkpoint import load_checkpoint, newest_checkpoint
from posttrain.core.training.learner import Learner
from posttrain.core.training.optim import MasterOptimizer
from posttrain.core.training.updates import UpdateSettings
from posttrain.core.types import Problem
from posttrain.pipelines.live import Live
from posttrain.pipelines.rl import rl_flow
from posttrain.pipelines.rl_loop import RlLoop
from posttrain.pipelines.rollouts import Rollouts
from posttrain.pipelines.stages.context import StageContext, StageOutput
from posttrain.pipelines.stages.episodes import build_episodes
from posttrain.pipelines.stages.rl_parts import (
    build_critic,
    build_guard,
    build_objective,
    build_ptx,
    build_trust_region,
    in_optimizer_steps,
)
from posttrain.pipelines.stages.rl_rewards import build_scorer


def run_rl(context: StageContext) -> StageOutput:
    """Train the input model with reinforcement learning; saves the result and the curves."""
    stage = context.stage
    assert isinstance(stage, RlStage)
    with context.engines.lease(context.model_dir) as engine, ExitStack() as opened:
        loop = build_loop(context, stage, engine)
        loop.check_sync("the start of the stage")
        if loop.scorer.pool is not None:
            opened.enter_context(loop.scorer.pool)
        found = newest_checkpoint(context.checkpoints)
        if found is not None:
            critic = None if loop.critic is None else loop.critic.optimizer
            learner = loop.learner
            state = load_checkpoint(
                found, learner.optimizer, critic=critic, reference=learner.reference
            )
            loop.resume(found, state)
        context.started(stage.steps)
        rl_flow(context.name, Live(loop))
    loop.learner.optimizer.close()
    if loop.critic is not None:
        loop.critic.optimizer.close()
    save_model(loop.learner.model, loop.tokenizer.tokenizer, context.out / "model")
    plots = learning_curves(
        loop.history, loop.evaluations, f"{context.run.name}: {context.name}", context.out / "plots"
    )
    for path in plots:
        context.tracker.log_file(path, "plots")
    return StageOutput(
        {"model": context.out / "model", "report": context.out / "plots"},
        loop.metrics,
        resumed=found is not None,
    )


def build_loop(context: StageContext, stage: RlStage, engine: RolloutEngine[Any]) -> RlLoop:
    """Load the models and build every plugin of the stage.

    Over 60 lines by a little: it is the list of what a stage is made of, and decides nothing.
    """
    run = context.run
    tokenizer = context.tokenizer()
    episodes = build_episodes(context, stage.environment, tokenizer)
    problems = context.training_problems(stage.steps * stage.prompts_per_step)
    held_out = context.held_out_problems(run.evaluation)
    longest = max(stage.generation.max_response_length, run.evaluation.max_response_length)
    context.check_lengths(episodes or tokenizer, [*problems, *held_out], longest)
    model = load_policy(context.model_dir, context.runtime)
    settings = UpdateSettings(
        epochs=stage.epochs,
        num_mini_batches=stage.num_mini_batches,
        micro_batch_size=stage.micro_batch_size,
        max_tokens=stage.max_tokens_per_microbatch,
        skip_idle_rows=stage.skip_idle_rows,
        temperature=stage.generation.temperature,
        seed=derive_seed(run.seed, context.name, "learner"),
        cut=Cut(stage.generation.top_k, stage.generation.top_p),
    )

    def worked(problem: Problem) -> tuple[int, ...]:
        prompt = tokenizer.encode_prompt(problem)
        return (*prompt, *tokenizer.encode_response(problem.worked))

    kl = context.build(KlEstimator, stage.kl.estimator)
    controller = context.build(KlController, stage.kl.controller)
    objective = build_objective(context, stage, kl if stage.kl.place == "loss" else None)
    section = in_optimizer_steps(stage.optimizer, settings.updates_per_batch)
    optimizer = MasterOptimizer(model, section, stage.steps * settings.updates_per_batch)
    reference = _reference(context, needed=controller.coefficient() > 0)
    learner = Learner(
        model,
        optimizer,
        objective,
        settings,
        reference,
        guard=build_guard(stage),
        ptx=build_ptx(context, stage, tokenizer),
        trust_region=build_trust_region(context, stage, model, settings),
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
        ),
        scorer=build_scorer(context, stage, tokenizer),
        estimator=context.build(AdvantageEstimator, stage.advantage),
        kl=kl,
        controller=controller,
        episodes=episodes,
        held_out=held_out,
        critic=build_critic(context, stage),
        sync_check=SyncCheck(
            engine,
            model,
            make_probe(tokenizer, run.model.max_model_len, [worked(p) for p in problems[:2]]),
            stage.check_sync,
        ),
    )


def _reference(context: StageContext, *, needed: bool) -> PreTrainedModel | None:
    """The frozen input model; not loaded when no KL term will read it."""
    if not needed:
        return None
    reference = load_policy(context.model_dir, context.runtime)
    reference.requires_grad_(False)
    return reference
