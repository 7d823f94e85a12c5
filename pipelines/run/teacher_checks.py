"""What `validate` checks of teachers that the config names: their vocabulary, and their servers.

Importing this module loads no model code.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from posttrain.core.config.rl_stage import RlStage
from posttrain.core.config.schema import RunConfig
from posttrain.core.config.teachers import TeacherSection
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.data.vocabulary import check_vocabulary


def check_teachers(
    config: RunConfig, policy: Path | None, tokenizer: ChatTokenizer | None
) -> list[str]:
    """Notes on what is checked when a stage starts.

    `policy` is the folder of the run's model and `tokenizer` its own, where they are here: what
    stages make of it has the same vocabulary. Raises `ResourceError` for a teacher of another one,
    and for a server that gives no log-probs.
    """
    notes: list[str] = []
    for stage, name, section in _teachers(config):
        where = f"stages.{stage}: teacher '{name}'"
        if section.folder is not None and policy is not None:
            check_vocabulary(policy, Path(section.folder).expanduser(), where)
        if section.base_url is not None and tokenizer is not None:
            notes += _check_server(where, name, section, tokenizer)
    return notes


def _teachers(config: RunConfig) -> Iterator[tuple[str, str, TeacherSection]]:
    for stage_name, stage in config.stages.items():
        if isinstance(stage, RlStage):
            for name, section in stage.teachers.items():
                yield stage_name, name, section


def _check_server(
    where: str, name: str, section: TeacherSection, tokenizer: ChatTokenizer
) -> list[str]:
    from posttrain.core.training.teacher_server import ServerAway, server_of  # loads models' code

    try:
        server_of(name, section).check(tokenizer)
    except ServerAway:
        return [f"{where}: nobody answers at {section.base_url} yet; the stage asks when it starts"]
    return []
