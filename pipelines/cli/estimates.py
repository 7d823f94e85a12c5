"""Rough figures for `posttrain plan`: parameters, memory, disk, time. Estimates, not bounds.

The rates come from SmolLM2-135M in bfloat16 on two CPU cores: 2,208 tokens through forward and
backward took 2.8 s (6 x parameters x tokens operations), and sampling ran at about 400 tokens/s
(2 x parameters operations each).
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from posttrain.core.config.base import TASK_DATA
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.config.schema import RunConfig, Stage, TransformStage
from posttrain.core.config.sections import EvaluationSection, ModelSection
from posttrain.core.config.supervised_stages import (
    EvaluateStage,
    PreferenceDataStage,
    PreferenceStage,
    SftStage,
)
from posttrain.core.data.preference_rows import read_preference_rows
from posttrain.core.runtime.processor import has_bfloat16_instructions

TRAIN_RATE_PER_CORE = 3e11  # operations per second
SAMPLE_RATE_PER_CORE = 5e10
GPU_TRAIN_RATE = 1e14
GPU_SAMPLE_RATE = 1e13
PROMPT_TOKENS = 64
"""Assumed length of a prompt; the real one needs the tokenizer."""
CHARACTERS_PER_TOKEN = 4
"""Assumed of a file's text, for the same reason."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """One stage in figures: gigabytes while it runs, gigabytes it leaves, seconds."""

    memory_gb: float
    disk_gb: float
    seconds: float


def count_parameters(section: ModelSection) -> tuple[int, str] | None:
    """Parameters of the base model and how they are known; None when nothing tells.

    Exact for a local directory (from the safetensors headers), else read from a size in the name
    such as `135M`.
    """
    folder = Path(section.source).expanduser()
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if files:
        return sum(_tensor_elements(path) for path in files), "counted"
    match = re.search(r"(\d+(?:\.\d+)?)([MmBb])(?![A-Za-z])", Path(section.source).name)
    if match is None:
        return None
    scale = 1e6 if match[2] in "Mm" else 1e9
    return int(float(match[1]) * scale), "from its name"


def _tensor_elements(path: Path) -> int:
    """Elements of all tensors in a safetensors file, read from its header alone."""
    with path.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    return sum(
        math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__"
    )


def estimate(stage: Stage, config: RunConfig, parameters: int, *, on_gpu: bool) -> Estimate:
    """Rough figures of one stage for a model of that many parameters."""
    cores = len(os.sched_getaffinity(0))
    train_rate = GPU_TRAIN_RATE if on_gpu else TRAIN_RATE_PER_CORE * cores
    sample_rate = GPU_SAMPLE_RATE if on_gpu else SAMPLE_RATE_PER_CORE * cores
    fast = on_gpu or has_bfloat16_instructions()
    half = config.model.dtype == "bfloat16" or (config.model.dtype == "auto" and fast)
    copy = parameters * (2 if half else 4)
    # AdamW: two float32 moments, gradients, and float32 master weights beside bfloat16 ones.
    training = copy * 2 + parameters * (12 if half else 8)
    if isinstance(stage, EvaluateStage):
        tokens = evaluation_tokens(stage.evaluation or config.evaluation)
        return Estimate(copy * 1.5 / 1e9, 0.01, 2 * parameters * tokens / sample_rate)
    if isinstance(stage, SftStage):
        tokens = stage.steps * stage.batch_size * (PROMPT_TOKENS + 32)
        return Estimate(training / 1e9, copy / 1e9, 6 * parameters * tokens / train_rate)
    if isinstance(stage, PreferenceDataStage):
        _, sampled, trained = preference_size(stage)
        # A preference stage also runs its reference forward.
        operations = (8 if isinstance(stage, PreferenceStage) else 6) * parameters * trained
        seconds = 2 * parameters * sampled / sample_rate + operations / train_rate
        return Estimate((training + copy) / 1e9, copy / 1e9, seconds)
    if isinstance(stage, TransformStage):
        tokens = transform_tokens(stage)
        return Estimate(copy * 1.5 / 1e9, 0.01, 2 * parameters * tokens / sample_rate)
    if isinstance(stage, RlStage):
        sampled, trained = rl_tokens(stage)
        # One more pass without gradient for the log-probs of the policy and of the reference.
        operations = (6 * stage.epochs + 4) * parameters * trained
        seconds = 2 * parameters * sampled / sample_rate + operations / train_rate
        if stage.evaluate_every:
            times = stage.steps // stage.evaluate_every
            tokens = evaluation_tokens(config.evaluation)
            seconds += times * 2 * parameters * tokens / sample_rate
        models = 2 + sum(reward.name == "reward_model" for reward in stage.rewards)
        checkpoint = training if stage.checkpoint_every else 0
        return Estimate((training + models * copy) / 1e9, (copy + checkpoint) / 1e9, seconds)
    return Estimate(0.1, 0.0, 1.0)


def evaluation_tokens(section: EvaluationSection) -> int:
    """Response tokens of one evaluation, at most."""
    return section.num_problems * (1 + section.num_samples) * section.max_response_length


def preference_size(stage: PreferenceDataStage) -> tuple[int, int, int]:
    """Pairs (or labelled rows), tokens sampled for them, tokens trained on in all epochs."""
    if stage.data == TASK_DATA:
        return 0, 0, 0  # how many there are is known when the task is built
    if stage.data is not None:
        _, rows = read_preference_rows(Path(stage.data), "data", ("pairs", "labels"))
        characters = sum(len(row.key) + len("".join(row.answers)) for row in rows)
        return len(rows), 0, stage.epochs * characters // CHARACTERS_PER_TOKEN
    pairs = stage.num_prompts * stage.pairs_per_prompt
    length = stage.generation.max_response_length
    sampled = stage.num_prompts * stage.num_generations * length
    return pairs, sampled, stage.epochs * pairs * 2 * (PROMPT_TOKENS + length)


def transform_tokens(stage: TransformStage) -> int:
    """Tokens sampled, at most: a rewriting and its solutions for each problem."""
    if stage.rewrite == "rules":
        return 0
    replies = stage.num_problems * (1 + stage.num_solutions)
    return replies * stage.generation.max_response_length


def rl_tokens(stage: RlStage) -> tuple[int, int]:
    """Tokens sampled and tokens trained on over the whole stage, at most."""
    sequences = stage.steps * stage.prompts_per_step * stage.num_generations
    sampled = sequences * stage.generation.max_response_length
    prompts = stage.steps * stage.prompts_per_step * PROMPT_TOKENS  # a group shares its prompt
    return sampled, sampled + prompts


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
        rows = preference_size(stage)[0]
        train = rows - round(rows * stage.held_out_fraction)
        steps = stage.epochs * -(-train // stage.batch_size)
        source = f"{rows} rows of {stage.data}"
        if stage.data is None:
            source = (
                f"{stage.num_prompts} problems x {stage.num_generations} answers = "
                f"{stage.num_prompts * stage.num_generations} sampled; at most {rows} pairs"
            )
        return (
            f"{source}, about {train} to train on in batches of {stage.batch_size}, "
            f"{stage.epochs} epoch(s): {steps} optimizer step(s)"
        )
    if isinstance(stage, RlStage):
        sequences = stage.prompts_per_step * stage.num_generations
        updates = stage.epochs * stage.num_mini_batches
        mini = sequences // stage.num_mini_batches
        return (
            f"{stage.prompts_per_step} prompts x {stage.num_generations} generations = {sequences} "
            f"sequences per step; {stage.epochs} epoch(s) x {stage.num_mini_batches} mini-batch(es)"
            f" of {mini} = {updates} optimizer step(s) per rollout; {stage.steps} steps sample at "
            f"most {rl_tokens(stage)[0]:,} tokens; {-(-mini // stage.micro_batch_size)} "
            "micro-batch(es) per optimizer step"
        )
    if isinstance(stage, TransformStage):
        return (
            f"at most {stage.num_problems} problems x (1 rewriting + {stage.num_solutions} "
            f"solutions), {transform_tokens(stage):,} tokens at most; integers and closed forms "
            "need none"
        )
    return f"registers as '{stage.registered_name}' with alias '{stage.alias}'"
