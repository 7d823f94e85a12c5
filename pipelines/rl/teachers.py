"""The teachers of a stage, loaded or asked by URL, and how problems are routed to them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from posttrain.core.config.distill_stage import RECORDED
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.contracts import DistillationLoss, TextLoss
from posttrain.core.data.token_bytes import Rereader, matched_tokens
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.data.vocabulary import check_vocabulary, logits_of, positions_of
from posttrain.core.models.loading import load_policy
from posttrain.core.training.forward import check_passes
from posttrain.core.training.teacher_contexts import TeacherContext
from posttrain.core.training.teacher_server import server_of
from posttrain.core.training.teacher_texts import TeacherReader
from posttrain.core.training.teachers import LocalTeacher, Routing, ScoresTokens, Teachers
from posttrain.pipelines.stage.inputs import StageInputs, StagePlugins


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
        check=context.check,
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
