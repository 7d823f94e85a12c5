"""Seconds of each stage: what a step is made of, how many there are, and what comes once.

Over 300 lines: one kind of stage after the other, as they are read beside each other.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from posttrain.core.config.base import TASK_DATA, StageBase
from posttrain.core.config.gate_stages import PromoteStage
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.config.schema import Stage, TransformStage
from posttrain.core.config.sections import LoraSection, OptimizerSection
from posttrain.core.config.supervised_stages import (
    EvaluateStage,
    PreferenceDataStage,
    PreferenceStage,
    RewardModelStage,
    SftStage,
)
from posttrain.core.costs.lengths import CHARACTERS_PER_TOKEN, Responses
from posttrain.core.costs.parts import RlParts, has_reference, parts_of
from posttrain.core.costs.reuse import kept_logits, reuses_products
from posttrain.core.costs.sureness import PARTS, alike, answers, answers_read, rows_a_step
from posttrain.core.costs.work import Rows, Work
from posttrain.core.data.preference import PAIR_PROMPTS_PER_CALL
from posttrain.core.data.preference_rows import read_preference_rows
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.rollout.sync_check import PROBE_LENGTH
from posttrain.core.training.columns import AUDITED_ROWS

FLOAT = 4
LOADING_S = 2.0
"""A stage loads a tokenizer and a model and starts an engine: a small model, 0.6 to 1.2 s on one
machine (Zen 4), 2.4 on another (Zen 3)."""
PAIRED = 0.5
"""Share of the pairs asked for that a fine-tuned policy's answers give: a guess. Groups that are
alike give none, those of few different answers less than they may: the quickstart's gave 62, 63 and
75 of 128."""
FISHER_PASSES = 2
"""A product with the Fisher matrix is a backward pass through a backward pass."""
TrainingStage = SftStage | RewardModelStage | PreferenceStage | RlStage
"""Stages that take optimizer steps."""


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds. `phases` are of a mean step, named as the run's `time/*_s`; `once` comes beside."""

    steps: int
    phases: Mapping[str, float] = field(default_factory=dict)
    once: float = 0.0

    @property
    def step_s(self) -> float:
        """A mean step."""
        return sum(self.phases.values())

    @property
    def total_s(self) -> float:
        """The stage."""
        loading = LOADING_S if self.steps else 0.0
        return loading + self.steps * self.step_s + self.once


def trained_parameters(work: Work, lora: LoraSection | None, *, head: bool) -> int:
    """Parameters with gradients and moments; without `head` of a reward model or critic."""
    if lora is not None:
        return work.shape.adapter(lora)
    return work.shape.total if head else work.shape.backbone


def stage_time(work: Work, stage: Stage, manager: PluginManager) -> StageTime | None:
    """Seconds of a stage; None where its amount of work is not known before it runs."""
    if isinstance(stage, SftStage):
        return _sft(work, stage)
    if isinstance(stage, RlStage):
        return _rl(work, stage, parts_of(stage, manager))
    if isinstance(stage, PreferenceDataStage):
        relative = isinstance(stage, PreferenceStage) and has_reference(stage, manager)
        return _preference(work, stage, relative=relative)
    if isinstance(stage, EvaluateStage):
        section = stage.evaluation or work.config.evaluation
        length = answers(work, stage, section.max_response_length)
        seconds = work.evaluate(section, length, samples=section.num_samples)
        return StageTime(1, {"evaluate": seconds})
    if isinstance(stage, TransformStage):
        return _transform(work, stage)
    if isinstance(stage, PromoteStage):  # a champion, if there is one, is measured as the model was
        return stage_time(work, work.config.stages[stage.inputs["evaluation"]], manager)
    return StageTime(0)


def sft_rows(work: Work, stage: SftStage) -> Rows:
    """Worked answers, each with its prompt."""
    limit = work.config.model.max_model_len
    responses = work.lengths.responses(limit, read=math.inf)
    return work.rows(stage.batch_size, 1, stage.micro_batch_size, responses, None)


def _sft(work: Work, stage: SftStage) -> StageTime:
    trained = trained_parameters(work, stage.lora, head=True)
    update = work.train(sft_rows(work, stage), stage.lora, trained, head=True)
    saved = work.write(saved_bytes(work, stage))
    phases = {
        "update": update + work.adamw(trained),
        "checkpoint": _checkpointing(work, stage),
    }
    return StageTime(stage.steps, phases, saved)


def rl_rows(work: Work, stage: RlStage, *, mini: bool, done: float = 0.0) -> Rows:
    """A step's responses, or those of one mini-batch, after `done` of the stage's steps."""
    responses = answers(work, stage, stage.generation.max_response_length, done)
    count = rows_a_step(stage)
    count //= stage.num_mini_batches if mini else 1
    group, micro = stage.num_generations, stage.micro_batch_size
    return work.rows(count, group, micro, responses, stage.max_tokens_per_microbatch)


def _rl(work: Work, stage: RlStage, parts: RlParts) -> StageTime:
    run = work.config
    each = [_rl_phases(work, stage, parts, done) for done in PARTS]
    phases = {name: statistics.fmean(part[name] for part in each) for name in each[0]}
    greedy = answers(work, stage, run.evaluation.max_response_length)
    once = work.evaluate(run.evaluation, greedy, samples=0) if stage.evaluate_every else 0.0
    phases |= {
        "sync": work.sync_weights(),
        "sync_check": _sync_check(work, stage),
        "evaluate": once * evaluations(stage) / stage.steps,
        "checkpoint": _checkpointing(work, stage),
    }
    return StageTime(stage.steps, phases, once + work.write(saved_bytes(work, stage)))


def _rl_phases(work: Work, stage: RlStage, parts: RlParts, done: float) -> dict[str, float]:
    """What depends on what the policy answers, after `done` of the steps."""
    rows = rl_rows(work, stage, mini=False, done=done)
    limit, group = stage.generation.max_response_length, stage.num_generations
    draw = partial(work.generate, stage.prompts_per_step, responses=rows.responses, limit=limit)
    advantage = parts.greedy_baseline * draw(group=1, greedy=True)
    if stage.kl.place == "reward" and parts.has_reference:
        advantage += parts.forward_passes * work.forward(rows, head=True)
        beside = 0
    else:
        beside = parts.forward_passes
    if stage.critic is not None:
        advantage += work.forward(rows, head=False)
    phases = {
        "rollout": draw(group=group),
        "score": 0.0,
        "advantage": advantage,
        "update": _rl_update(work, stage, parts, done),
    }
    # What is not computed is not measured either.
    reused = min(parts.old_logprobs, beside) if reuses_products(work, stage, parts) else 0
    if reused:
        phases["update"] += work.forward(rows, head=True, reused=True)
    if beside > reused:
        phases["update"] += (beside - reused) * work.forward(rows, head=True)
    if parts.reward_models:
        phases["score"] += parts.reward_models * work.forward(rows, head=False)
    if reuses_products(work, stage, parts):
        kept = rows.tokens(rows.count) * work.product_bytes
        phases["rollout"] += kept * work.rates.copy_s
    return phases


def checkpoints(every: int, steps: int, kept: int = 0) -> int:
    """How many a stage writes; the last step's result is the model itself.

    `kept` is the period of those that stay for a replay.
    """
    before_last = max(0, steps - 1)
    both = before_last // math.lcm(every, kept) if every and kept else 0
    return sum(before_last // period for period in (every, kept) if period) - both


def training_steps(work: Work, stage: TrainingStage) -> int:
    """Steps after which there can be a checkpoint; 0 where they are not known before the run."""
    if isinstance(stage, SftStage | RlStage):
        return stage.steps
    return preference_steps(stage, expected_rows(work, stage))


def master_bytes(section: OptimizerSection) -> int:
    """Of the float32 copy of a weight of lower precision."""
    return FLOAT if section.rounding == "masters" else 0


def moment_bytes(section: OptimizerSection) -> int:
    """Of AdamW's two moments, for each trained parameter."""
    return 2 * (FLOAT if section.moments == "float32" else 1)


def checkpoint_bytes(work: Work, stage: TrainingStage) -> float:
    """Weights as the optimizer keeps them, and moments, of what the stage makes and its critic."""
    head = not isinstance(stage, RewardModelStage)
    trained = trained_parameters(work, stage.lora, head=head)
    size = trained * (_kept_bytes(work, stage.optimizer) + moment_bytes(stage.optimizer))
    if isinstance(stage, RlStage) and stage.critic is not None:
        trained, section = trained_parameters(work, stage.critic.lora, head=False), stage.critic
        size += trained * (_kept_bytes(work, section.optimizer) + moment_bytes(section.optimizer))
    return float(size)


def _checkpointing(work: Work, stage: TrainingStage) -> float:
    """Seconds of a mean step."""
    steps = training_steps(work, stage)
    count = checkpoints(stage.checkpoint_every, steps, work.config.keep.every)
    return work.write(checkpoint_bytes(work, stage)) * count / max(1, steps)


def _kept_bytes(work: Work, section: OptimizerSection) -> int:
    """Of a weight in a checkpoint: of its master, unless it has none."""
    return FLOAT if section.rounding == "masters" else work.bytes_each


def saved_bytes(work: Work, stage: StageBase) -> float:
    """The model that a stage saves, in its own precision, and its adapter; 0 if it makes none."""
    if not isinstance(stage, SftStage | PreferenceDataStage | RlStage):
        return 0.0
    head = not isinstance(stage, RewardModelStage)
    factors = 0 if stage.lora is None else work.shape.adapter(stage.lora)
    size = work.shape.total if head else work.shape.backbone
    return float(work.bytes_each * (size + factors))


def evaluations(stage: RlStage) -> int:
    """Evaluations after a step: every `evaluate_every`, and after the last."""
    if not stage.evaluate_every:
        return 0
    return math.ceil(stage.steps / stage.evaluate_every)


def _rl_update(work: Work, stage: RlStage, parts: RlParts, done: float) -> float:
    """All epochs and mini-batches, the critic's too."""
    rows = rl_rows(work, stage, mini=True, done=done)
    if parts.compares and answers_read(work.config, stage):
        left = 1 - alike(rows.responses.nats)
        rows = replace(rows, count=max(1, round(left * rows.count)))
    trained = trained_parameters(work, stage.lora, head=True)
    updates = stage.epochs * stage.num_mini_batches
    reusing = int(reuses_products(work, stage, parts))  # the first of them
    one = 0.0
    if reusing:
        known = kept_logits(work, stage) > 0
        one += reusing / updates * work.train_reused(rows, trained, head=known)
    if reusing < updates:
        one += (1 - reusing / updates) * work.train(rows, stage.lora, trained, head=True)
    if parts.pretraining_rows:
        texts = work.lengths.responses(work.config.model.max_model_len, read=math.inf)
        more = work.rows(parts.pretraining_rows, 1, stage.micro_batch_size, texts, None)
        one += work.train(more, stage.lora, trained, head=True)
    if parts.trust_region is not None:
        config = parts.trust_region
        one *= 1 + FISHER_PASSES * config.cg_iters * config.fvp_token_fraction
        one += work.forward(rows, head=True)  # the step is looked at before it is taken
    one += work.adamw(trained)
    seconds = updates * one
    if reusing:  # what the engine computed itself does not tell how far it is from the trainer
        group = min(AUDITED_ROWS, rows.group)
        audited = replace(rows, count=AUDITED_ROWS, micro=AUDITED_ROWS, group=group)
        seconds += work.forward(audited, head=True)
    critic = stage.critic
    if critic is not None:
        whole = rl_rows(work, stage, mini=False, done=done)
        own = trained_parameters(work, critic.lora, head=False)
        passes = work.train(whole, critic.lora, own, head=False)
        seconds += critic.epochs * (passes + critic.num_mini_batches * work.adamw(own))
    return seconds


def _sync_check(work: Work, stage: RlStage) -> float:
    """Two probes through trainer (together) and engine (one by one), and all weights compared.

    An engine that can tell of its weights is probed after the first sync alone.
    """
    if stage.check_sync == "never":
        return 0.0
    first = 1 / stage.steps
    compared = 1.0 if stage.check_sync == "every" else first
    probed = first if work.engine == "transformers" and stage.lora is None else compared
    probe = work.few_tokens([2 * PROBE_LENGTH, PROBE_LENGTH, PROBE_LENGTH])
    return probed * probe + compared * work.copy_model()


def preference_size(stage: PreferenceDataStage) -> tuple[int, int]:
    """Pairs or labelled rows, at most, and mean tokens of an answer in a file (0: not a file)."""
    if stage.data == TASK_DATA:
        return 0, 0  # how many there are is known when the task is built
    if stage.data is None:
        return stage.num_prompts * stage.pairs_per_prompt, 0
    _, rows = read_preference_rows(Path(stage.data), "data", ("pairs", "labels"))
    answers = [answer for row in rows for answer in row.answers]
    return len(rows), max(1, sum(map(len, answers)) // CHARACTERS_PER_TOKEN // len(answers))


def compares_answers(stage: StageBase) -> bool:
    """Whether it learns from how its model's own answers to one prompt differ."""
    return isinstance(stage, RlStage) or (
        isinstance(stage, PreferenceDataStage) and stage.data is None
    )


def expected_rows(work: Work, stage: PreferenceDataStage) -> int:
    """Of the most that `preference_size` tells, those that a fine-tuned policy is taken to give."""
    rows, _ = preference_size(stage)
    guessed = compares_answers(stage) and answers_read(work.config, stage)
    return round(PAIRED * rows) if guessed else rows


def trained_rows(stage: PreferenceDataStage, rows: int) -> int:
    """`rows` without those held out."""
    return rows - round(rows * stage.held_out_fraction)


def preference_steps(stage: PreferenceDataStage, rows: int) -> int:
    """Optimizer steps on `rows`, those held out left out."""
    return stage.epochs * math.ceil(trained_rows(stage, rows) / stage.batch_size)


def preference_rows(work: Work, stage: PreferenceDataStage) -> Rows:
    """Answers of one mini-batch, two to a pair: an epoch's pairs are cut into equal parts."""
    limit, length = stage.generation.max_response_length, preference_size(stage)[1]
    responses = Responses((length,)) if length else answers(work, stage, limit)
    pairs, train = stage.batch_size, trained_rows(stage, expected_rows(work, stage))
    if train:  # else how many there are is not known yet
        pairs = math.ceil(train / math.ceil(train / pairs))
    return work.rows(2 * pairs, 2, 2 * stage.micro_batch_size, responses, None)


def _preference(
    work: Work, stage: RewardModelStage | PreferenceStage, *, relative: bool
) -> StageTime | None:
    """Answers are sampled once, then trained on; `relative` to a reference model or not."""
    count = expected_rows(work, stage)
    if not count:
        return None
    once = 0.0
    if stage.data is None:
        limit = stage.generation.max_response_length
        responses = answers(work, stage, limit)
        at_once = min(PAIR_PROMPTS_PER_CALL, stage.num_prompts)
        call = work.generate(at_once, stage.num_generations, responses, limit)
        once = call * stage.num_prompts / at_once
    rows, policy = preference_rows(work, stage), isinstance(stage, PreferenceStage)
    trained = trained_parameters(work, stage.lora, head=policy)
    update = work.train(rows, stage.lora, trained, head=policy) + work.adamw(trained)
    scoring = work.forward(rows, head=policy)
    if relative:
        update += scoring
        scoring *= 2
    held_out = round(count * stage.held_out_fraction)
    once += scoring * held_out / (rows.count / 2) + work.write(saved_bytes(work, stage))
    phases = {"update": update, "checkpoint": _checkpointing(work, stage)}
    return StageTime(training_steps(work, stage), phases, once)


def _transform(work: Work, stage: TransformStage) -> StageTime:
    """At most: a rewriting and its solutions for each problem, each of the full length."""
    if stage.rewrite == "rules":
        return StageTime(0)
    limit = stage.generation.max_response_length
    draw = partial(work.generate, stage.batch_size, responses=Responses((limit,)), limit=limit)
    each = draw(group=1, greedy=True) + draw(group=stage.num_solutions)
    return StageTime(math.ceil(stage.num_problems / stage.batch_size), {"generate": each})
