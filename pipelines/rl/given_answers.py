"""Answers that a stage learns from and its policy did not sample: who gives them, at which steps.

Whether a step is such a step is a draw that the run's seed and the step decide, so a run that goes
on and a replay take the same answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from posttrain.core.batch import RolloutBatch
from posttrain.core.config.distill_stage import RECORDED, DistillStage
from posttrain.core.config.given_answers_checks import differs
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.contracts import DistillationLoss, PromptGroup, SampledGroup
from posttrain.core.data.problem_sets import check_disjoint
from posttrain.core.data.teacher_record import TeacherRecord, check_record
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import ConfigError, DataError
from posttrain.core.rollout.episodes import generate_groups
from posttrain.core.rollout.prompts import PromptStream
from posttrain.core.runtime.seeding import derive_seed, generator
from posttrain.core.training.teacher_server import server_of
from posttrain.core.training.teachers import Routing
from posttrain.core.types import Completion, SamplingParams
from posttrain.pipelines.rl.build import sampling_of
from posttrain.pipelines.rl.teachers import routing_of, teacher_folder
from posttrain.pipelines.stage.context import StageContext
from posttrain.pipelines.stage.engines import EnginePool

Samples = Callable[[Sequence[PromptGroup], SamplingParams], list[SampledGroup]]
"""What a teacher samples: a group for each prompt, in order."""


class GivesAnswers(Protocol):
    """Whoever has answers for the next prompts."""

    def answers(self, step: int, prompts: PromptStream) -> list[SampledGroup] | RolloutBatch:
        """Those of `step`: groups, or a batch that has columns of teachers already."""


@dataclass(frozen=True, slots=True)
class GivenAnswers:
    """Answers of `source` at each step with probability 1 - `share`."""

    source: GivesAnswers
    share: float
    seed: int

    def are_of(self, step: int) -> bool:
        """Whether `step` learns from them."""
        drawn = torch.rand((), generator=generator(self.seed, "on_policy_share", step))
        return float(drawn) >= self.share


@dataclass(frozen=True, slots=True)
class WorkedAnswers:
    """The data's own answers to `count` prompts a step, cut at `longest` tokens."""

    tokenizer: ChatTokenizer
    count: int
    longest: int

    def answers(self, step: int, prompts: PromptStream) -> list[SampledGroup]:
        """As in `GivesAnswers`."""
        return [
            SampledGroup(prompt, (worked_completion(self.tokenizer, prompt, self.longest),))
            for prompt in prompts.take(self.count)
        ]


def worked_completion(tokenizer: ChatTokenizer, prompt: PromptGroup, longest: int) -> Completion:
    """The worked answer to `prompt`, cut at `longest` tokens, as nobody sampled it."""
    whole = tokenizer.encode_worked(prompt.problem)
    ids = whole[:longest]
    return Completion(
        token_ids=ids,
        logprobs=(math.nan,) * len(ids),
        finish_reason="stop" if len(ids) == len(whole) else "length",
        policy_version=0,
        seed=0,
        engine="data",
        engine_version="",
    )


@dataclass(frozen=True, slots=True)
class TeacherAnswers:
    """What the teachers sample, each for the prompts that are routed to it.

    `samples` follow the order of the teachers; `params` gives those of a step.
    """

    samples: Sequence[Samples]
    routing: Routing | None
    count: int
    params: Callable[[int], SamplingParams]

    def answers(self, step: int, prompts: PromptStream) -> list[SampledGroup]:
        """As in `GivesAnswers`. The teacher's own log-probs are not those of a policy."""
        taken, params = prompts.take(self.count), self.params(step)
        places = [0] * len(taken)
        if self.routing is not None:
            places = self.routing.places([prompt.problem for prompt in taken])
        found: dict[int, SampledGroup] = {}
        for place, samples in enumerate(self.samples):
            mine = [index for index, teacher in enumerate(places) if teacher == place]
            if mine:
                groups = samples([taken[index] for index in mine], params)
                found |= zip(mine, map(_without_logprobs, groups), strict=True)
        return [found[index] for index in range(len(taken))]


def _without_logprobs(group: SampledGroup) -> SampledGroup:
    completions = [
        replace(each, logprobs=(math.nan,) * len(each.token_ids)) for each in group.completions
    ]
    return SampledGroup(group.prompt, tuple(completions))


@dataclass(frozen=True, slots=True)
class RecordedAnswers:
    """The rows of a record, `count` a step."""

    record: TeacherRecord
    tokenizer: ChatTokenizer
    count: int

    def answers(self, step: int, prompts: PromptStream) -> RolloutBatch:
        """As in `GivesAnswers`; `prompts` are those of the record, in its order."""
        return self.record.batch(prompts.take_indices(self.count), self.tokenizer)


def open_given(
    context: StageContext, stage: RlStage, tokenizer: ChatTokenizer, opened: ExitStack
) -> GivenAnswers | None:
    """The stage's source of answers, if it learns from given ones; engines close with `opened`."""
    if stage.on_policy_share == 1:
        return None
    source: GivesAnswers
    if isinstance(stage, DistillStage) and stage.learns_from_record:
        record = open_record(context, stage)
        source = RecordedAnswers(record, tokenizer, stage.prompts_per_step)
    elif stage.seq_kd:
        source = _of_teachers(context, stage, tokenizer, opened)
    else:
        limit = stage.generation.max_response_length
        source = WorkedAnswers(tokenizer, stage.prompts_per_step, limit)
    seed = derive_seed(context.run.seed, context.name, "given_answers")
    return GivenAnswers(source, stage.on_policy_share, seed)


def open_record(context: StageContext, stage: DistillStage) -> TeacherRecord:
    """The record of the stage, which fits it. Raises `ResourceError` or `ConfigError`."""
    given = stage.recorded
    folder = context.inputs[RECORDED].path if given is None else Path(given).expanduser()
    record, who = TeacherRecord.open(folder), f"stages.{context.name}: the record '{folder}'"
    check_record(record.index, context.model_dir, who)
    assert stage.distillation is not None, "checked with the config"
    wanted = context.build(DistillationLoss, stage.distillation).num_candidates()
    for field, text in differs(stage, wanted, record.index.top_k, record.index.temperature):
        raise ConfigError(f"stages.{context.name}.{field}: {text}")
    limit = context.run.model.max_model_len
    if record.longest > limit:
        raise DataError(
            f"{who} has an answer of {record.longest} tokens with its prompt, and "
            f"model.max_model_len is {limit}; raise that, or record shorter answers"
        )
    check_disjoint([p.problem for p in record.prompts], context.held_out(context.run.evaluation))
    return record


def _of_teachers(
    context: StageContext, stage: RlStage, tokenizer: ChatTokenizer, opened: ExitStack
) -> TeacherAnswers:
    found: list[Samples] = []
    for name, section in stage.teachers.items():
        if section.base_url is not None:
            server = server_of(name, section)
            server.check_sampling(tokenizer)
            found.append(partial(server.sample, ends=tokenizer.end_token_ids, check=context.check))
            continue
        pool = opened.enter_context(
            closing(EnginePool(context.run, context.manager, context.runtime))
        )
        engine = opened.enter_context(pool.lease(teacher_folder(context, stage, name)))
        found.append(partial(generate_groups, engine))

    def params(step: int) -> SamplingParams:
        return sampling_of(stage, derive_seed(context.draw_seed, context.name, "teacher", step))

    return TeacherAnswers(found, routing_of(stage), stage.prompts_per_step, params)


def kept_by(given: GivenAnswers | None, stage: RlStage) -> bool:
    """Whether samples must be kept, since a server would not give them a second time."""
    servers = any(teacher.base_url is not None for teacher in stage.teachers.values())
    return given is not None and stage.seq_kd and servers
