"""What is settled before a run begins: base model, champion, and the rows of its round."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.core.config.resolve import ResolvedRun
from posttrain.core.config.sections import ModelSection, RegisteredName
from posttrain.core.config.stages import NewDataStage
from posttrain.core.contracts import Task
from posttrain.core.data.cursor import Cursor, PinnedModel, read_cursor, row_digest, write_cursor
from posttrain.core.errors import ConfigError, ResourceError, nearest
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.runtime.seeding import derive_seed
from posttrain.core.store.locks import locked
from posttrain.core.types import Problem


@dataclass(frozen=True, slots=True)
class Found:
    """The model section to use; `pinned` is the registered version behind it, if it is one."""

    section: ModelSection
    pinned: PinnedModel | None = None


def tracking_uri(home: Path) -> str | None:
    """Where MLflow's data are; None where there is no database in this home yet."""
    given = os.environ.get("MLFLOW_TRACKING_URI")
    if given:
        return given
    database = home.resolve() / "mlflow" / "mlflow.db"
    return f"sqlite:///{database}" if database.is_file() else None


def find_base(section: ModelSection, home: Path) -> Found:
    """The section with a hub id or directory as its source. Reads only."""
    named = RegisteredName.parse(section.source)
    if named is None:
        return Found(section)
    uri = tracking_uri(home)
    known: list[str] = []
    if uri is not None:
        from posttrain.core.tracking import registry  # MLflow takes 2 s to import

        if named.alias is not None:
            version = registry.find_alias(uri, named.name, named.alias)
        else:
            version = registry.find_version(uri, named.name, str(named.version))
        if version is not None:
            registry.check_weights(version)
            reported = f"{named.name} version {version.version}"
            reported += f" ({named.alias})" if named.alias else ""
            pinned = PinnedModel(str(version.path), version.digest, version.model_id, reported)
            return Found(at(section, pinned), pinned)
        known = registry.names(uri)
    if section.until_registered is not None:
        return Found(_with_source(section, section.until_registered))
    raise ResourceError(
        f"model.source '{section.source}': there is no such model in MLflow"
        f"{nearest(named.name, known)} (registered: {known or 'none'}); promote or register one, "
        "or set model.until_registered to the model to begin with"
    )


def at(section: ModelSection, pinned: PinnedModel) -> ModelSection:
    """The section with the folder of a registered version as its source."""
    return _with_source(section, pinned.path)


def with_model(resolved: ResolvedRun, section: ModelSection) -> ResolvedRun:
    if section == resolved.config.model:
        return resolved
    return replace(resolved, config=resolved.config.model_copy(update={"model": section}))


def _with_source(section: ModelSection, source: str) -> ModelSection:
    return section.model_copy(update={"source": source, "until_registered": None})


CURSOR_FILE = "cursor.json"


@dataclass(frozen=True, slots=True)
class Begun:
    """A run with its base model settled; `rows` of its round, if it is about new rows."""

    resolved: ResolvedRun
    pinned: PinnedModel | None = None
    rows: tuple[Problem, ...] = ()
    cursor: Cursor | None = None
    path: Path | None = None
    lock: ExitStack | None = field(default=None, repr=False)
    reported: str = ""
    nothing_new: str = ""

    @property
    def rows_digest(self) -> str:
        return self.cursor.round.digest if self.cursor and self.cursor.round else ""

    def finish(self) -> None:
        if self.cursor is not None and self.path is not None:
            write_cursor(self.path, self.cursor.finish())

    def close(self) -> None:
        if self.lock is not None:
            self.lock.close()


def data_stage(resolved: ResolvedRun) -> NewDataStage | None:
    stages = resolved.config.stages.values()
    return next((stage for stage in stages if isinstance(stage, NewDataStage)), None)


def cursor_path(resolved: ResolvedRun, home: Path) -> Path:
    return home / "continual" / resolved.config.name / CURSOR_FILE


def begin(
    resolved: ResolvedRun, manager: PluginManager, home: Path, *, fresh: bool = False
) -> Begun:
    """Settle base model and rows, and write them down before anything is computed.

    An unfinished round goes on with its own rows and base model, as long as its rows still exist;
    `fresh` gives it up. Raises `ResourceError` while another process is in a round of this config.
    """
    if data_stage(resolved) is None:
        found = find_base(resolved.config.model, home)
        return Begun(with_model(resolved, found.section), found.pinned)
    path = cursor_path(resolved, home)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = ExitStack()
    lock.enter_context(locked(path.with_name("lock"), waits=partial(_refuse, path)))
    try:
        begun = look(resolved, manager, home, fresh=fresh)
        if begun.cursor is not None and not begun.nothing_new:
            write_cursor(path, begun.cursor)
    except BaseException:
        lock.close()
        raise
    return replace(begun, path=path, lock=lock)


def look(
    resolved: ResolvedRun, manager: PluginManager, home: Path, *, fresh: bool = False
) -> Begun:
    """What `begin` would settle; writes nothing."""
    stage = data_stage(resolved)
    if stage is None:
        found = find_base(resolved.config.model, home)
        return Begun(with_model(resolved, found.section), found.pinned)
    cursor = read_cursor(cursor_path(resolved, home))
    rows = _rows(resolved, manager)
    unfinished = cursor.round
    if unfinished is not None and not fresh and set(unfinished.rows) <= rows.keys():
        section, pinned = resolved.config.model, unfinished.base
        if pinned is None:
            found = find_base(section.model_copy(update=_first(resolved)), home)
            section, pinned = found.section, found.pinned
        else:
            section = at(section, pinned)
        reported = f"round {unfinished.number} goes on: {len(unfinished.rows)} rows"
        chosen = tuple(rows[digest] for digest in unfinished.rows)
        return Begun(with_model(resolved, section), pinned, chosen, cursor, reported=reported)
    new = [digest for digest in rows if digest not in cursor.seen]
    if len(new) < stage.min_rows:
        return Begun(resolved, cursor=cursor, nothing_new=_nothing(rows, new, cursor, stage))
    found = find_base(resolved.config.model, home)
    taken = new[: stage.max_rows]
    cursor = cursor.begin(taken, found.pinned)
    left = f", {len(new) - len(taken)} left for later" if len(new) > len(taken) else ""
    reported = f"round {cursor.finished + 1}: {len(taken)} new rows{left}"
    chosen = tuple(rows[digest] for digest in taken)
    return Begun(
        with_model(resolved, found.section), found.pinned, chosen, cursor, reported=reported
    )


def _first(resolved: ResolvedRun) -> dict[str, object]:
    """A round that began before there was a champion goes on from where it began."""
    model = resolved.config.model
    if model.until_registered is None:
        return {}
    return {"source": model.until_registered, "until_registered": None}


def _nothing(rows: dict[str, Problem], new: Sequence[str], cursor: Cursor, s: NewDataStage) -> str:
    reported = f"{len(rows)} rows, {len(new)} of them new since round {cursor.finished}"
    if not cursor.finished:
        reported = f"{len(rows)} rows"
    wanted = f"; a round begins with {s.min_rows} (min_rows)" if s.min_rows > 1 else ""
    return f"no new data: {reported}{wanted}"


def _rows(resolved: ResolvedRun, manager: PluginManager) -> dict[str, Problem]:
    """Every training problem by the digest of its row, in an order that the seed decides."""
    config = resolved.config
    task: Task[Any] = manager.build(Task, config.task.name, config.task.fields())
    available = task.available("train")
    if available is None:
        raise ConfigError(
            f"task '{config.task.name}' makes problems without end, so none is ever new: a stage "
            "of kind 'new_data' needs a task of rows, such as jsonl"
        )
    if not available:
        return {}
    seed = derive_seed(config.seed, "problems", "new_data")
    return {row_digest(problem): problem for problem in task.problems("train", available, seed)}


def _refuse(path: Path, holder: str) -> None:
    raise ResourceError(
        f"another run of this config is in a round ({holder}, lock {path.with_name('lock')}): wait "
        "until it has ended, or give the config another name"
    )
