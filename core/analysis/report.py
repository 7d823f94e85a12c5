"""A report: a title, notes, tables and pictures, and the same as one JSON object.

A report is rendered as an HTML page that loads nothing, as Markdown, and as tables at a terminal.
All text is escaped, since some of it was written by a model.
"""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.core.errors import ResourceError
from posttrain.core.runtime.files import write_text

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class Link:
    """A page to open, in a table."""

    url: str

    def __str__(self) -> str:
        return self.url


Cell = str | float | int | bool | Link | None
"""A value in a table; None is something that does not exist here."""
Row = Mapping[str, Cell]
_STYLE = """
body{font:15px/1.5 system-ui,'DejaVu Sans',sans-serif;max-width:1200px;margin:2em auto;
padding:0 1em;color:#1a1a1a}h1{font-size:1.5em}h2{font-size:1.15em;margin:2em 0 .3em}
table{border-collapse:collapse;font-size:13px;display:block;overflow-x:auto}
th,td{padding:.3em .7em;border-bottom:1px solid #ddd;text-align:left;vertical-align:top;
white-space:pre-wrap;max-width:36em}th{background:#f5f5f5}td.n{text-align:right;white-space:nowrap;
font-variant-numeric:tabular-nums}p.note{color:#555;margin:.2em 0 .6em;font-size:13px}
ul.notes{background:#fff8e1;border-left:4px solid #e0a800;padding:.6em 2em}img{max-width:100%}
"""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a title; `note` says what the numbers are and their units."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Picture:
    """A PNG under a title; `note` is also its alternative text."""

    title: str
    png: bytes
    note: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """A title, sentences that a reader must know first, and what follows them.

    `values` is the report as JSON. `page` is the HTML page of a report that has a special one.
    """

    title: str
    notes: Sequence[str] = ()
    parts: Sequence[Table | Picture] = ()
    values: Mapping[str, object] = field(default_factory=dict)
    page: str = ""

    @property
    def tables(self) -> list[Table]:
        """The tables alone, as a terminal shows them."""
        return [part for part in self.parts if isinstance(part, Table)]

    def frames(self) -> dict[str, pd.DataFrame]:
        """The tables as DataFrames, by their titles."""
        import pandas as pd

        return {t.title: pd.DataFrame(list(t.rows), columns=list(t.columns)) for t in self.tables}

    def html(self) -> str:
        """The whole page."""
        if self.page:
            return self.page
        return html_page(self.title, _STYLE, self._repr_html_(), allowed="; img-src data:")

    def _repr_html_(self) -> str:
        """Title, notes, tables and pictures, as a notebook shows them."""
        notes = "".join(f"<li>{escaped(note)}</li>" for note in self.notes)
        parts = [_table_html(p) if isinstance(p, Table) else _picture_html(p) for p in self.parts]
        return (
            f"<h1>{escaped(self.title)}</h1>"
            + (f'<ul class="notes">{notes}</ul>' if notes else "")
            + "".join(parts)
        )

    def show(self, console: Console) -> None:
        """Title, notes and tables at a terminal."""
        from rich.text import Text

        console.print(Text(shown(self.title), style="bold"))
        for note in self.notes:
            console.print(Text(f"note: {shown(note)}"))
        for table in self.tables:
            show_table(table, console)

    def markdown(self) -> str:
        """Notes and tables; pictures are on the page only."""
        parts = [f"# {_marked(self.title)}", *(f"> {_marked(note)}" for note in self.notes)]
        return "\n\n".join([*parts, *map(table_markdown, self.tables)]) + "\n"


def table(title: str, rows: Iterable[Row], note: str = "") -> Table:
    """A table of rows by column name; a column without any value is left out."""
    rows = list(rows)
    known = dict.fromkeys(name for row in rows for name in row)
    names = [name for name in known if any(row.get(name) is not None for row in rows)]
    return Table(title, names, [[row.get(name) for name in names] for row in rows], note)


def shown(value: object) -> str:
    """A cell as text: four significant digits, `-` for nothing, control characters made visible.

    A model's text could otherwise move a terminal's cursor or change its colour.
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(value))


def printable(text: str) -> str:
    """The text with its lines and tabs, but without other control characters."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def _is_number(value: object) -> bool:
    """Whether a cell is aligned to the right."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def in_words(value: object) -> str:
    """Nested values as a person would write them: `accuracy, reward_model (weight 0.2)`."""
    if isinstance(value, Mapping):
        rest = ", ".join(f"{k} {in_words(v)}" for k, v in value.items() if k != "name")
        if "name" not in value:
            return rest or "nothing"
        return f"{value['name']} ({rest})" if rest else str(value["name"])
    if isinstance(value, list | tuple):
        return ", ".join(map(in_words, value)) or "nothing"
    return "none" if value is None else shown(value)


def listed(steps: Iterable[int], limit: int = 12) -> str:
    """Numbers with commas, the middle left out of many."""
    numbers = list(steps)
    first = ", ".join(map(str, numbers[:limit]))
    return first if len(numbers) <= limit else f"{first} ... {numbers[-1]} ({len(numbers)} in all)"


def shortened(text: str, limit: int = 160) -> str:
    """The first `limit` characters of `text`, with dots where there were more."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def plain(value: object) -> object:
    """`value` for JSON, which has no NaN and no infinity: both become null, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def write_page(path: Path, text: str) -> Path:
    """Write a page's text to `path`, whole or not at all; raises `ResourceError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    except OSError as error:
        raise ResourceError(
            f"cannot write the page {path}: {error.strerror or error}; name another file with "
            "--out, in a folder that can be written to"
        ) from error
    return path


# --- terminal ------------------------------------------------------------------------------------


def show_table(table: Table, console: Console) -> None:
    """A table at a terminal, after an empty line; long texts are shortened."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    console.print()
    console.print(Text(shown(table.title), style="bold"))
    if table.note:
        console.print(Text(table.note, style="dim"))
    made = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(table.columns):
        numbers = any(_is_number(row[index]) for row in table.rows)
        made.add_column(Text(shown(name)), justify="right" if numbers else "left", overflow="fold")
    for row in table.rows:
        made.add_row(*(Text(shortened(shown(cell), 200)) for cell in row))
    console.print(made if table.rows else Text("nothing"), soft_wrap=False)


# --- HTML ----------------------------------------------------------------------------------------


def escaped(value: object) -> str:
    """The value as text of an HTML page."""
    return html.escape(shown(value))


def html_page(title: str, style: str, body: str, *, allowed: str = "", head: str = "") -> str:
    """A page that loads nothing. `style` is CSS, `body` and `head` are HTML.

    The browser itself refuses whatever a mistake here would let it load or run; `allowed` is what
    the page needs besides its style.
    """
    policy = f"default-src 'none'; style-src 'unsafe-inline'{allowed}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">{head}'
        f"<title>{escaped(title)}</title><style>{style}</style></head>"
        f"<body>{body}</body></html>\n"
    )


def _heading(title: str, note: str) -> str:
    return f"<h2>{escaped(title)}</h2>" + (f'<p class="note">{escaped(note)}</p>' if note else "")


def _table_html(table: Table) -> str:
    names = "".join(f"<th>{escaped(name)}</th>" for name in table.columns)
    head = f"<tr>{names}</tr>" if any(table.columns) else ""
    rows = "".join(f"<tr>{''.join(map(_cell_html, row))}</tr>" for row in table.rows)
    body = f"{head}{rows}" if table.rows else "<tr><td>nothing</td></tr>"
    return f"{_heading(table.title, table.note)}<table>{body}</table>"


def _cell_html(value: Cell) -> str:
    kind = ' class="n"' if _is_number(value) else ""
    text = escaped(value)
    if isinstance(value, Link):
        text = f'<a href="{text}" target="_blank" rel="noopener">{text}</a>'
    return f"<td{kind}>{text}</td>"


def _picture_html(picture: Picture) -> str:
    data = base64.b64encode(picture.png).decode()
    alt = escaped(picture.note or picture.title)
    heading = _heading(picture.title, picture.note)
    return f'{heading}<img alt="{alt}" src="data:image/png;base64,{data}">'


# --- Markdown ------------------------------------------------------------------------------------


def _marked(value: object) -> str:
    """Text in which nothing acts as Markdown."""
    if isinstance(value, Link):
        return f"<{value}>"
    text = shown(value)
    for mark in ("\\", "|", "`", "<", "*", "_", "[", "#"):
        text = text.replace(mark, f"\\{mark}")
    return text


def table_markdown(table: Table) -> str:
    """A table under its heading."""
    lines = [f"## {_marked(table.title)}", "", *([_marked(table.note), ""] if table.note else [])]
    if not table.rows:
        return "\n".join([*lines, "nothing"])
    rows = [f"| {' | '.join(map(_marked, row))} |" for row in (table.columns, *table.rows)]
    return "\n".join([*lines, rows[0], "|" + "---|" * len(table.columns), *rows[1:]])
