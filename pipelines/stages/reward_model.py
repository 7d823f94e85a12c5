"""Stage `reward_model`: a Bradley-Terry reward model on the model's own right and wrong answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from posttrain.core.config.schema import RewardModelStage
from posttrain.core.contracts import PreferenceLoss, RolloutEngine
from posttrain.core.data.tokenization import ChatTokenizer
from posttrain.core.errors import DataError
from posttrain.core.math.intervals import wilson
from posttrain.core.models.loading import load_reward_model, save_model
from posttrain.core.runtime.seeding import derive_seed, generator
from posttrain.core.training.optim import MasterOptimizer
from posttrain.core.training.reward_model import (
    Pair,
    make_pairs,
    pair_hits,
    preference_step,
    split_pairs,
)
from posttrain.core.types import Problem, SamplingParams
from posttrain.pipelines.engines import PAIR_PROMPTS_PER_CALL
from posttrain.pipelines.stages.context import StageContext, StageOutput


def run_reward_model(context: StageContext) -> StageOutput:
    """Sample answers, pair right with wrong, train, and measure pairs of unseen problems."""
    stage = context.stage
    assert isinstance(stage, RewardModelStage)
    problems = context.training_problems(stage.num_prompts)
    tokenizer = context.tokenizer()
    context.check_lengths(tokenizer, problems, stage.generation.max_response_length)
    with context.engines.lease(context.model_dir) as engine:
        pairs = sample_pairs(context, stage, engine, tokenizer, problems)
    train, held_out = split_pairs(pairs, stage.held_out_fraction)
    if not train or not held_out:
        raise DataError(
            f"only {len(pairs)} (right, wrong) pairs came of {stage.num_prompts} problems, too few "
            "to train and to measure: raise num_prompts or num_generations, or choose a task that "
            "the model solves sometimes"
        )
    metrics = train_on_pairs(context, stage, tokenizer, train, held_out)
    return StageOutput({"reward_model": context.out / "reward_model"}, metrics)


def sample_pairs(
    context: StageContext,
    stage: RewardModelStage,
    engine: RolloutEngine[Any],
    tokenizer: ChatTokenizer,
    problems: Sequence[Problem],
) -> list[Pair]:
    """(right, wrong) pairs of the engine's own answers to `problems`."""
    pairs: list[Pair] = []
    table: list[dict[str, object]] = []
    for start in range(0, len(problems), PAIR_PROMPTS_PER_CALL):
        context.check()
        part = problems[start : start + PAIR_PROMPTS_PER_CALL]
        prompts = [tokenizer.encode_prompt(p) for p in part]
        params = SamplingParams(
            num_generations=stage.num_generations,
            max_tokens=stage.generation.max_response_length,
            temperature=stage.generation.temperature,
            top_p=stage.generation.top_p,
            top_k=stage.generation.top_k,
            seed=derive_seed(context.run.seed, context.name, start),
        )
        for problem, prompt, group in zip(
            part, prompts, engine.generate(prompts, params), strict=True
        ):
            answers = []
            for completion in group:
                text = tokenizer.decode_response(completion.token_ids)
                correct = context.task.verify(problem, text).correct >= 1.0
                answers.append((completion.token_ids, correct))
                table.append({"prompt": problem.prompt, "response": text, "correct": correct})
            pairs += make_pairs(problem.key, prompt, answers, stage.pairs_per_prompt)
        context.reporter.say(f"{context.name}: {len(pairs)} pairs of {start + len(part)} problems")
    context.tracker.log_table("answers", 0, table[:200])
    return pairs


def train_on_pairs(
    context: StageContext,
    stage: RewardModelStage,
    tokenizer: ChatTokenizer,
    train: Sequence[Pair],
    held_out: Sequence[Pair],
) -> dict[str, float]:
    """Train, save, and return the held-out pair accuracy with its interval."""
    model = load_reward_model(context.model_dir, context.runtime, new_head=True)
    model.config.pad_token_id = tokenizer.pad_token_id
    steps_per_epoch = -(-len(train) // stage.batch_size)
    total_steps = stage.epochs * steps_per_epoch
    optimizer = MasterOptimizer(model, stage.optimizer, total_steps)
    loss = context.manager.build(
        PreferenceLoss,
        stage.preference_loss.name,
        stage.preference_loss.fields(),
    )
    context.started(total_steps)
    for step in range(1, total_steps + 1):
        context.check()
        epoch, position = divmod(step - 1, steps_per_epoch)
        order = torch.randperm(
            len(train), generator=generator(context.run.seed, context.name, "order", epoch)
        ).tolist()
        chosen = order[position * stage.batch_size : (position + 1) * stage.batch_size]
        metrics = preference_step(
            model,
            optimizer,
            [train[i] for i in chosen],
            loss,
            micro_batch_size=stage.micro_batch_size,
            check=context.check,
        )
        context.log_step(step, metrics)
    optimizer.close()
    hits = pair_hits(model, held_out, stage.micro_batch_size, context.check)
    low, high = wilson(hits, len(held_out))
    final = {
        "rm/held_out_pair_accuracy": hits / len(held_out),
        "rm/held_out_low": low,
        "rm/held_out_high": high,
        "rm/num_pairs": float(len(train)),
        "rm/num_held_out_pairs": float(len(held_out)),
    }
    context.tracker.log_summary(final)
    save_model(model, tokenizer.tokenizer, context.out / "reward_model")
    return metrics | final
