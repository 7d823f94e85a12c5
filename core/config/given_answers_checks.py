"""What a stage that learns from answers which its policy did not sample cannot be."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from posttrain.core.config.distill_stage import DistillStage, RecordTeacherStage
from posttrain.core.config.loading import LoadedConfig
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.config.teaching_checks import TeachingCheck
from posttrain.core.contracts import REWARD_COLUMNS, TEXT_COLUMNS

OF_SAMPLING = REWARD_COLUMNS | {"advantages", "old_logprobs", "rollout_logprobs", "is_weight"}
"""Columns that only answers have which the policy sampled."""


def check_given_answers(
    teaching: TeachingCheck, loaded: LoadedConfig, build: Callable[..., Any], kl_coef: float
) -> Iterable[str]:
    """One line for each setting that needs what such answers do not have.

    `build` makes a plugin; `kl_coef` is where the controller of the KL term starts.
    """
    stage, line = teaching.stage, teaching.line
    if stage.on_policy_share == 1:
        if stage.seq_kd:
            yield line(
                "seq_kd",
                "every step samples from the policy, so the teacher would sample nothing; set "
                "on_policy_share below 1, such as 0.5, or remove it",
            )
        if not stage.learns_from_record:
            return
    yield from _readers(teaching)
    yield from _parts(stage, build, kl_coef, line)
    yield from _teachers(stage, line)
    loss = teaching.distillation
    if stage.seq_kd and loss is not None and loss.required_columns() & TEXT_COLUMNS:
        yield line(
            "seq_kd",
            f"'{loss.name}' is for a teacher with a tokenizer of its own, which "
            "cannot go on from the policy's tokens; set false",
        )
    if isinstance(stage, DistillStage) and stage.learns_from_record:
        yield from _record(stage, teaching, loaded)


def _readers(teaching: TeachingCheck) -> Iterable[str]:
    """Terms that are about tokens which the policy sampled itself."""
    share = f"on_policy_share is {teaching.stage.on_policy_share:g}"
    for loss in teaching.losses:
        if loss.source == "rollout" and (read := loss.required_columns() & OF_SAMPLING):
            yield teaching.line(
                "policy_loss",
                f"'{loss.name}' reads {sorted(read)}, which an answer has that the policy sampled, "
                f"and {share}; set it to 1, or set policy_loss: null and use `distillation`",
            )
    if teaching.transforms:
        yield teaching.line(
            "advantage_transform",
            f"advantages are of answers that the policy sampled, and {share}; set it to 1, or "
            "remove it and use `distillation`",
        )
    loss = teaching.distillation
    if loss is None:
        return
    if read := loss.required_columns() & OF_SAMPLING:
        yield teaching.line(
            "distillation",
            f"it reads {sorted(read)}, which an answer has that the policy sampled, and {share}; "
            "set it to 1, or remove ratio_cap and use rest: tail",
        )
    elif loss.reads() == "sampled":
        yield teaching.line(
            "distillation",
            "it reads the answer's own token alone, which says something of the policy where the "
            f"policy sampled it, and {share}; set it to 1, or use support: topk or full",
        )


def _parts(
    stage: RlStage, build: Callable[..., Any], kl_coef: float, line: Callable[[str, str], str]
) -> Iterable[str]:
    """Parts of the stage that work on what was sampled."""
    why = "a step on given answers has no samples"
    if stage.max_staleness:
        yield line("max_staleness", f"{why}, whose age this would bound; set 0")
    if stage.environment is not None:
        yield line("environment", f"{why}, and no episode; remove it, or set on_policy_share: 1")
    if not build("sampler", stage.sampler).is_plain:
        yield line("sampler", f"{why}, which '{stage.sampler.name}' would choose; set group")
    if stage.rollout_correction.plugin.name != "none" or stage.rollout_correction.bypass_old:
        yield line("rollout_correction", f"{why} to correct; remove it")
    if stage.kl_guard is not None:
        yield line("kl_guard", f"{why} from whose policy the KL would be; set null")
    if stage.resample is not None:
        yield line("resample", f"{why} with rewards; set null")
    exact = build("kl", stage.kl.estimator).from_logits and stage.kl.place == "loss"
    if kl_coef > 0 and not exact:
        yield line(
            "kl",
            f"'{stage.kl.estimator.name}' estimates a KL from sampled tokens, and {why}; set "
            "kl.controller: {name: fixed, coef: 0}, or kl.estimator: full in the loss",
        )


def _teachers(stage: RlStage, line: Callable[[str, str], str]) -> Iterable[str]:
    """Teachers that cannot judge, or cannot sample, an answer."""
    for name, teacher in stage.teachers.items():
        if teacher.policy is not None and teacher.policy.context == "sibling":
            yield line(
                f"teachers.{name}.policy.context",
                "a given answer has no sibling; set worked or metadata, or on_policy_share: 1",
            )
        elif teacher.policy is not None and stage.seq_kd:
            yield line(
                "seq_kd",
                f"teacher '{name}' is the policy itself, which samples already; set false, or use "
                "a teacher with weights of its own",
            )
    if not stage.seq_kd:
        return
    if not stage.teachers:
        yield line("seq_kd", "there is no teacher that could sample; set false, or add a teacher")
    if stage.teacher_routing is not None and stage.teacher_routing.unknown == "skip":
        yield line(
            "teacher_routing.unknown",
            "with seq_kd a problem without a teacher would get no answer; set error",
        )


def _record(stage: DistillStage, teaching: TeachingCheck, loaded: LoadedConfig) -> Iterable[str]:
    """A record that is not there, or does not have what the loss reads."""
    if stage.on_policy_share:
        yield teaching.line(
            "on_policy_share",
            "a record says nothing of what the policy samples; set 0, or use a teacher in place of "
            "the record",
        )
    if stage.recorded is not None and not Path(stage.recorded).expanduser().is_dir():
        yield teaching.line(
            "recorded",
            f"there is no folder '{stage.recorded}', which a stage `record_teacher` should have "
            f"made; relative paths start at {Path.cwd()}",
        )
    loss = teaching.distillation
    if loss is None:
        yield teaching.line(
            "distillation", "a record is read by a divergence alone; set distillation: gkd"
        )
        return
    if loss.reads() == "logits":
        yield teaching.line(
            "distillation",
            "it reads the teacher's whole distribution, or what it says of the policy's own "
            "candidates, and a record has the teacher's best candidates; set support: topk and of: "
            "teacher",
        )
        return
    made = loaded.config.stages.get(stage.inputs.get("recorded", ""))
    if isinstance(made, RecordTeacherStage):
        for field, text in differs(
            stage, loss.num_candidates(), made.top_k, made.generation.temperature
        ):
            yield teaching.line(field, text)


def differs(
    stage: RlStage, wanted: int, top_k: int, temperature: float
) -> Iterable[tuple[str, str]]:
    """(field, problem) where a record of `top_k` candidates at `temperature` does not fit `stage`,
    which reads `wanted`.
    """
    if wanted > top_k:
        yield (
            "distillation",
            f"it reads the teacher's best {wanted} tokens, and the record has {top_k}; set top_k: "
            f"{top_k}, or record more",
        )
    if stage.generation.temperature != temperature:
        yield (
            "generation.temperature",
            f"the record's log-probs are at temperature {temperature:g}, and the policy's would be "
            f"at {stage.generation.temperature:g}; set {temperature:g}, or record again",
        )
