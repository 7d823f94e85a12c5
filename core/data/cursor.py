"""Which rows a config was trained on already, and which its unfinished round is about.

A round is the rows and the base model of one run, fixed when it begins. Until it is finished, the
same command continues this very round: rows that came since wait, and a champion that the round
itself made is not what it starts from again. Rows count as seen when the round is finished.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from posttrain.core.data.problems import problem_content
from posttrain.core.errors import DataError
from posttrain.core.runtime.files import WrongContent, read_json, write_text
from posttrain.core.types import Problem

VERSION = 1
DIGEST_LENGTH = 32


@dataclass(frozen=True, slots=True)
class PinnedModel:
    """The base model of a round: its folder, digest, id in MLflow, and what it is, in words."""

    path: str
    digest: str
    model_id: str
    reported: str


@dataclass(frozen=True, slots=True)
class Round:
    """An unfinished round: digests of its rows, in order, and its base model if that can move."""

    number: int
    rows: tuple[str, ...]
    base: PinnedModel | None

    @property
    def digest(self) -> str:
        return hashlib.sha256("\n".join(self.rows).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Cursor:
    """What one config has finished, and what it is in the middle of."""

    finished: int = 0
    seen: frozenset[str] = frozenset()
    round: Round | None = None

    def begin(self, rows: Sequence[str], base: PinnedModel | None) -> Cursor:
        """A new round about these rows, in place of one that is unfinished."""
        return replace(self, round=Round(self.finished + 1, tuple(rows), base))

    def finish(self) -> Cursor:
        if self.round is None:
            return self
        return Cursor(self.finished + 1, self.seen | set(self.round.rows), None)


def row_digest(problem: Problem) -> str:
    """What makes a row this row: its content, and not its place in a file."""
    text = json.dumps(problem_content(problem))
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]


class _Base(BaseModel):
    model_config = ConfigDict(extra="forbid")

    path: str
    digest: str
    model_id: str
    reported: str


class _Round(BaseModel):
    number: int
    rows: list[str]
    base: _Base | None


class _Values(BaseModel):
    version: int
    finished: int
    round: _Round | None
    seen: list[str]


def read_cursor(path: Path) -> Cursor:
    """The cursor of a config; an empty one if it never ran. Raises `DataError` if it is damaged."""
    if not path.exists():
        return Cursor()
    try:
        values = read_json(path, _Values)
        if values["version"] != VERSION:
            raise WrongContent(f"version {values['version']}, expected {VERSION}")
    except WrongContent as error:
        raise DataError(
            f"{path}, which keeps what was trained on, cannot be read ({error}): restore it, or "
            "remove it, and every row counts as new"
        ) from error
    found = values["round"]
    if found is not None:
        base = None if found["base"] is None else PinnedModel(**found["base"])
        found = Round(found["number"], tuple(found["rows"]), base)
    return Cursor(values["finished"], frozenset(values["seen"]), found)


def write_cursor(path: Path, cursor: Cursor) -> None:
    """Replace it whole: a kill leaves the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {
        "version": VERSION,
        "finished": cursor.finished,
        "round": None if cursor.round is None else asdict(cursor.round),
        "seen": sorted(cursor.seen),
    }
    write_text(path, json.dumps(values))
