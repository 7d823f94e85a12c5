"""The batch arithmetic of `posttrain plan`, in words."""

from __future__ import annotations

from posttrain.core.config.base import TASK_DATA
from posttrain.core.config.gate_stages import ApproveStage, NewDataStage, PromoteStage
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.config.schema import RegisterStage, RunConfig, Stage, TransformStage
from posttrain.core.config.supervised_stages import (
    EvaluateStage,
    PreferenceDataStage,
    SftStage,
)
from posttrain.core.costs.times import preference_size, preference_steps, trained_rows


def transform_tokens(stage: TransformStage) -> int:
    """Tokens sampled, at most: a rewriting and its solutions for each problem."""
    if stage.rewrite == "rules":
        return 0
    replies = stage.num_problems * (1 + stage.num_solutions)
    return replies * stage.generation.max_response_length


def rl_tokens(stage: RlStage) -> int:
    """Tokens sampled over the whole stage, at most."""
    sequences = stage.steps * stage.prompts_per_step * stage.num_generations
    return sequences * stage.generation.max_response_length


def arithmetic(stage: Stage, config: RunConfig) -> str:
    """The batch arithmetic of a stage in words."""
    if isinstance(stage, EvaluateStage):
        section = stage.evaluation or config.evaluation
        answers = section.num_problems * (1 + section.num_samples)
        return (
            f"{section.num_problems} problems x (1 greedy + {section.num_samples} sampled) = "
            f"{answers} answers of at most {section.max_response_length} tokens"
        )
    if isinstance(stage, SftStage):
        micro = -(-stage.batch_size // stage.micro_batch_size)
        return (
            f"{stage.steps} steps x {stage.batch_size} examples = "
            f"{stage.steps * stage.batch_size} examples; {micro} micro-batch(es) a step"
        )
    if isinstance(stage, PreferenceDataStage):
        if stage.data == TASK_DATA:
            return (
                f"the pairs of task '{config.task.name}' in batches of {stage.batch_size}, "
                f"{stage.epochs} epoch(s); time is not estimated"
            )
        rows, _ = preference_size(stage)
        train, steps = trained_rows(stage, rows), preference_steps(stage, rows)
        source, about = f"{rows} rows of {stage.data}", "about"
        if stage.data is None:
            about = "at most"
            source = (
                f"{stage.num_prompts} problems x {stage.num_generations} answers = "
                f"{stage.num_prompts * stage.num_generations} sampled; at most {rows} pairs"
            )
        return (
            f"{source}, {about} {train} to train on in batches of {stage.batch_size}, "
            f"{stage.epochs} epoch(s): {about} {steps} optimizer step(s)"
        )
    if isinstance(stage, RlStage):
        sequences = stage.prompts_per_step * stage.num_generations
        updates = stage.epochs * stage.num_mini_batches
        mini = sequences // stage.num_mini_batches
        return (
            f"{stage.prompts_per_step} prompts x {stage.num_generations} generations = {sequences} "
            f"sequences per step; {stage.epochs} epoch(s) x {stage.num_mini_batches} mini-batch(es)"
            f" of {mini} = {updates} optimizer step(s) per rollout; {stage.steps} steps sample at "
            f"most {rl_tokens(stage):,} tokens; {-(-mini // stage.micro_batch_size)} "
            "micro-batch(es) per optimizer step"
        )
    if isinstance(stage, TransformStage):
        return (
            f"at most {stage.num_problems} problems x (1 rewriting + {stage.num_solutions} "
            f"solutions), {transform_tokens(stage):,} tokens at most; integers and closed forms "
            "need none"
        )
    return _of_gates(stage)


def _of_gates(stage: ApproveStage | PromoteStage | NewDataStage | RegisterStage) -> str:
    """Stages that decide what becomes of a model, or of new rows."""
    if isinstance(stage, ApproveStage):
        return "a person is asked" + (
            "" if stage.timeout_hours is None else f", for {stage.timeout_hours:g} hours"
        )
    if isinstance(stage, PromoteStage):
        return (
            f"champion of '{stage.registered_name}' if the lower bound of the paired difference is "
            f"above {stage.min_improvement:+g}; measures the champion if there is one"
        )
    if isinstance(stage, NewDataStage):
        most = "all new rows" if stage.max_rows is None else f"{stage.max_rows} new rows at most"
        return f"{most}, {stage.min_rows} at least"
    return f"registers as '{stage.registered_name}' with alias '{stage.alias}'"
