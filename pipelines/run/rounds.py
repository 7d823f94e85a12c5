"""What is settled before a run begins: base model, champion, and the rows of its round."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.core.config.gate_stages import NewDataStage
from posttrain.core.config.resolve import ResolvedRun
from posttrain.core.config.sections import ModelSection
from posttrain.core.contracts import Task
from posttrain.core.data.cursor import Cursor, PinnedModel, read_cursor, row_digest, write_cursor
from posttrain.core.errors import ConfigError, ResourceError
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.runtime.seeding import derive_seed
from posttrain.core.store.locks import locked
from posttrain.core.types import Problem
from posttrain.pipelines.run.model_reference import at, find_base


def with_model(resolved: ResolvedRun, section: ModelSection) -> ResolvedRun:
    if section == resolved.config.model:
        return resolved
    return replace(resolved, config=resolved.config.model_copy(update={"model": section}))


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
    resolved: ResolvedRun,
    manager: PluginManager,
    home: Path,
    *,
    store: Path | None = None,
    fresh: bool = False,
) -> Begun:
    """Settle base model and rows, and write them down before anything is computed.

    An unfinished round goes on with its own rows and base model, as long as its rows still exist;
    `fresh` gives it up. Raises `ResourceError` while another process is in a round of this config.
    """
    if data_stage(resolved) is None:
        found = find_base(resolved.config.model, home, store)
        return Begun(with_model(resolved, found.section), found.pinned)
    path = cursor_path(resolved, home)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = ExitStack()
    lock.enter_context(locked(path.with_name("lock"), waits=partial(_refuse, path)))
    try:
        begun = look(resolved, manager, home, store=store, fresh=fresh)
        if begun.cursor is not None and not begun.nothing_new:
            write_cursor(path, begun.cursor)
    except BaseException:
        lock.close()
        raise
    return replace(begun, path=path, lock=lock)


def look(
    resolved: ResolvedRun,
    manager: PluginManager,
    home: Path,
    *,
    store: Path | None = None,
    fresh: bool = False,
) -> Begun:
    """What `begin` would settle; writes nothing."""
    stage = data_stage(resolved)
    if stage is None:
        found = find_base(resolved.config.model, home, store)
        return Begun(with_model(resolved, found.section), found.pinned)
    cursor = read_cursor(cursor_path(resolved, home))
    rows = _rows(resolved, manager)
    unfinished = cursor.round
    if unfinished is not None and not fresh and set(unfinished.rows) <= rows.keys():
        section, pinned = resolved.config.model, unfinished.base
        if pinned is None:
            found = find_base(section.model_copy(update=_first(resolved)), home, store)
            section, pinned = found.section, found.pinned
        else:
            section = at(section, pinned.path)
        reported = f"round {unfinished.number} goes on: {len(unfinished.rows)} rows"
        chosen = tuple(rows[digest] for digest in unfinished.rows)
        return Begun(with_model(resolved, section), pinned, chosen, cursor, reported=reported)
    new = [digest for digest in rows if digest not in cursor.seen]
    if len(new) < stage.min_rows:
        return Begun(resolved, cursor=cursor, nothing_new=_nothing(rows, new, cursor, stage))
    found = find_base(resolved.config.model, home, store)
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
    task: Task[Any] = manager.task(config.task)
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
