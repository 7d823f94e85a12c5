"""What `validate` checks of teachers and records that the config names: vocabulary, servers.

Importing this module loads no model code.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posttrain.core.config.distill_stage import DistillStage, RecordTeacherStage
from posttrain.core.config.given_answers_checks import differs
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.config.schema import RunConfig
from posttrain.core.config.teachers import TEACHER, TeacherSection
from posttrain.core.contracts import DistillationLoss, TextLoss
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.data.vocabulary import check_vocabulary
from posttrain.core.errors import ConfigError
from posttrain.core.plugin_manager import PluginManager


def check_teachers(
    config: RunConfig,
    policy: Path | None,
    tokenizer: ChatTokenizer | None,
    manager: PluginManager,
) -> list[str]:
    """Notes on what is checked when a stage starts.

    `policy` is the folder of the run's model and `tokenizer` its own, where they are here: what
    stages make of it has the same vocabulary. Raises `ResourceError` for a teacher or record of
    another one, unless the stage learns from texts, and for a server that cannot give what the
    stage asks for, `ConfigError` for a record that lacks what the stage reads.
    """
    notes: list[str] = []
    for place, stage in config.stages.items():
        if isinstance(stage, DistillStage) and stage.recorded is not None:
            _check_record(place, stage, policy, manager)
    for place, stage, name, section in _teachers(config):
        where = f"stages.{place}: teacher '{name}'"
        folder = None if section.folder is None else Path(section.folder).expanduser()
        if folder is not None and policy is not None and not _by_text(stage, manager):
            check_vocabulary(policy, folder, where)
        if folder is not None and tokenizer is not None and _by_text(stage, manager):
            from posttrain.core.data.token_bytes import Rereader

            Rereader.of(tokenizer, ChatTokenizer.load(folder, config.model.system_prompt))
        if section.base_url is not None and tokenizer is not None:
            top_k, longest = _candidates(stage, manager), config.model.max_model_len
            notes += _of_server(
                name, section, where, tokenizer, top_k, longest, samples=stage.seq_kd
            )
    for place, stage in config.stages.items():
        if isinstance(stage, RecordTeacherStage) and stage.teacher is not None and tokenizer:
            where, longest = f"stages.{place}: teacher", config.model.max_model_len
            samples = stage.answers == "sampled"
            notes += _of_server(
                TEACHER, stage.teacher, where, tokenizer, stage.top_k, longest, samples=samples
            )
    return notes


def _of_server(
    name: str,
    section: TeacherSection,
    where: str,
    tokenizer: ChatTokenizer,
    top_k: int,
    longest: int,
    *,
    samples: bool,
) -> Iterator[str]:
    """Ask the server; a note where nobody answers."""
    from posttrain.core.training.teacher_server import ServerAway, server_of

    try:
        server = server_of(name, section)
        server.check(tokenizer, top_k=top_k, longest=longest)
        if samples:
            server.check_sampling(tokenizer)
    except ServerAway:
        yield (f"{where}: nobody answers at {section.base_url} yet; the stage asks when it starts")


def _check_record(
    place: str, stage: DistillStage, policy: Path | None, manager: PluginManager
) -> None:
    from posttrain.core.data.teacher_record import check_record, read_index

    assert stage.recorded is not None
    index = read_index(Path(stage.recorded).expanduser())
    if policy is not None:
        check_record(index, policy, f"stages.{place}: the record '{stage.recorded}'")
    wanted = _candidates(stage, manager)
    for field, problem in differs(stage, wanted, index.top_k, index.temperature):
        raise ConfigError(f"stages.{place}.{field}: {problem}")


def _teachers(config: RunConfig) -> Iterator[tuple[str, RlStage, str, TeacherSection]]:
    for place, stage in config.stages.items():
        if isinstance(stage, RlStage):
            for name, section in stage.teachers.items():
                yield place, stage, name, section


def _loss(stage: RlStage, manager: PluginManager) -> DistillationLoss[Any] | None:
    section = stage.distillation
    if section is None:
        return None
    return manager.build(DistillationLoss, section.name, section.fields())


def _by_text(stage: RlStage, manager: PluginManager) -> bool:
    """Whether its teachers may have tokenizers of their own."""
    return isinstance(_loss(stage, manager), TextLoss)


def _candidates(stage: RlStage, manager: PluginManager) -> int:
    """How many candidates the stage asks its teachers for."""
    loss = _loss(stage, manager)
    return 0 if loss is None else loss.num_candidates()
