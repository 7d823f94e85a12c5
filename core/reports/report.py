"""What a report is made of, apart from how it is shown: notes, tables and pictures in order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

Cell = str | float | int | bool | None
"""A value in a table; None is something that does not exist here."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a title; `note` says what the numbers are and their units."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Picture:
    """A PNG under a title; `note` is also what is read where it cannot be seen."""

    title: str
    png: bytes
    note: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """A title, sentences that a reader must know first, and what follows them."""

    title: str
    notes: Sequence[str] = ()
    parts: Sequence[Table | Picture] = field(default_factory=tuple)

    def tables(self) -> list[Table]:
        """The tables alone, as a terminal shows them."""
        return [part for part in self.parts if isinstance(part, Table)]


def shown(value: Cell) -> str:
    """A cell as text: four significant digits, `-` for nothing, control characters made visible.

    Text of a model could move a terminal's cursor or colour it, were they left in.
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(value))


def shortened(text: str, limit: int = 160) -> str:
    """The first `limit` characters of `text`, with dots where there were more."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def plain(value: object) -> object:
    """`value` for JSON, which has no NaN and no infinity: both become null, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
