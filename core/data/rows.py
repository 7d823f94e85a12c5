"""Rows of any data file that people have, a row in memory at a time: the one reader of all stages.

A source is a file, a folder of files of one kind, or a data set on the hub. The ending of a file's
name says how it is read.
"""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from posttrain.core.data.tables import (
    HubSource,
    arrow_rows,
    hub_rows,
    parquet_rows,
    resolve_revision,
)
from posttrain.core.errors import DataError
from posttrain.core.runtime.files import irregular
from posttrain.core.runtime.json_files import (
    MAX_LINE,
    JsonRow,
    no_rows,
    open_data,
    stream_json,
    stream_json_lines,
)
from posttrain.core.store.manifests import combine_digests, file_digest

EXAMPLE = '{"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}'
HUB = "hub:"
HUB_FORM = "hub:owner/name[/subset][@revision][#split]"
FIX = "download its files, and give their path"
MOST_COUNTED = 10_000
"""Rows after a refused one that are read to count those that are refused as well."""
Reader = Callable[[Path, str], Iterator[JsonRow]]
T = TypeVar("T")


def is_hub(source: str) -> bool:
    """Whether `source` names a data set on the hub and no file."""
    return source.startswith(HUB)


def data_rows(source: str, setting: str) -> Iterator[JsonRow]:
    """Rows of a file, a folder or a data set on the hub (`hub:owner/name/subset@revision#split`).

    `where` of a row is its file and number. Raises `DataError` that names `setting`, file and row.
    """
    if is_hub(source):
        hub, split = hub_source(source, setting)
        yield from hub_rows(resolve_revision(hub, FIX), split, FIX)
        return
    names: tuple[Path, Sequence[str]] | None = None
    for file in data_files(source, setting):
        for number, row in enumerate(READERS[ending(file)](file, setting)):
            if number == 0 and ending(file) in TABLES:
                _check_same(names, file, list(row.values))
                names = names or (file, list(row.values))
            yield row


def each_row(rows: Iterable[JsonRow], read: Callable[[JsonRow], T]) -> Iterator[T]:
    """What `read` makes of each row, up to the first that it refuses.

    That row's `DataError` is raised, and says how many rows after it are refused as well.
    """
    left = iter(rows)
    for row in left:
        try:
            made = read(row)
        except DataError as error:
            raise DataError(f"{error}{_refused_too(left, read)}") from error
        yield made


def _refused_too(rows: Iterator[JsonRow], read: Callable[[JsonRow], object]) -> str:
    looked = refused = 0
    try:
        for row in itertools.islice(rows, MOST_COUNTED):
            looked += 1
            try:
                read(row)
            except DataError:
                refused += 1
    except DataError:  # the rest of the file cannot be read
        refused += 1
        looked += 1
    if not refused:
        return ""
    return f" ({refused} of the {looked} rows after it are refused, too)"


def data_files(source: str, setting: str) -> list[Path]:
    """The file itself, or the data files of a folder in the order of their names; none of a hub."""
    if is_hub(source):
        return []
    path = Path(source).expanduser()
    if path.is_dir():
        return _folder_files(path, setting)
    if not path.exists():
        hint = ""
        if re.fullmatch(r"[\w-]+/[\w.-]+", source):
            hint = f"for the data set of that name on the hub write {HUB}{source}; else "
        raise DataError(
            f"cannot read {source}, which is not there, expected a data file, a folder of them or "
            f"{HUB_FORM}: {hint}correct {setting}; relative paths start at {Path.cwd()}"
        )
    kind = irregular(path)
    if kind:
        raise DataError(f"cannot read {source}, which is {kind} and not a file: correct {setting}")
    if ending(path) not in READERS:
        packed = path.suffix.lower() in PACKED
        fix = "unpack it" if packed else "rename the file so that its ending says what it holds"
        raise DataError(
            f"{source} has the ending '{path.suffix}', expected one of {', '.join(READERS)}: "
            f"{fix}, or correct {setting}"
        )
    return [path]


def data_digest(source: str, setting: str) -> str:
    """Digest of the source's content, so that edited data are new data."""
    files = data_files(source, setting)
    if files:
        return combine_digests({str(i): file_digest(path) for i, path in enumerate(files)})
    digest = hashlib.sha256()
    for row in data_rows(source, setting):
        digest.update(json.dumps(row.values, sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()


def ending(file: Path) -> str:
    """What says how the file is read: `.jsonl`, `.csv.gz`; lower case."""
    name = file.name.lower()
    inner = Path(name.removesuffix(".gz")).suffix
    return inner + ".gz" if name.endswith(".gz") else inner


def hub_source(source: str, setting: str) -> tuple[HubSource, str]:
    """The data set and the split that `hub:owner/name[/subset][@revision][#split]` names."""
    found = re.fullmatch(
        r"hub:(?P<name>[\w.-]+/[\w.-]+)(/(?P<subset>[^@#]+))?(@(?P<revision>[^#]+))?(#(?P<split>.+))?",
        source,
    )
    if found is None:
        raise DataError(f"{setting} is '{source}', expected {HUB_FORM}: correct it")
    hub = HubSource(found["name"], found["subset"] or "", found["revision"])
    return hub, found["split"] or "train"


def _folder_files(folder: Path, setting: str) -> list[Path]:
    """The data files of `folder`, all of one kind and of one split."""
    found = sorted(
        file
        for file in folder.iterdir()
        if ending(file) in READERS
        and file.name not in DESCRIPTIONS
        and not file.name.startswith((".", "_"))
        and file.is_file()
    )
    if not found:
        inner = sorted(p.name for p in folder.iterdir() if p.is_dir() and p.name[:1] != ".")[:6]
        also = f"; it has the folders {', '.join(inner)}: name one of them" if inner else ""
        raise DataError(
            f"the folder {folder} has no data file ({', '.join(READERS)}){also}: correct "
            f"{setting}, or add one"
        )
    by_reader = {READERS[ending(file)]: file for file in reversed(found)}
    splits = {split: file for file in reversed(found) if (split := _split_name(file))}
    for several, what in ((by_reader, "of several kinds"), (splits, "of several splits")):
        if len(several) > 1:
            names = ", ".join(sorted(file.name for file in several.values()))
            raise DataError(
                f"the folder {folder} has files {what} ({names}), expected rows of one kind that "
                f"belong together: name one file in {setting}, or move the others away"
            )
    return found


def _split_name(file: Path) -> str:
    """`train` or `test` if the file's name says that it is one of a data set's splits."""
    found = re.match(r"(train|test|valid|validation|val|dev|eval)(?![a-z])", file.name.lower())
    return "" if found is None else "train" if found[1] == "train" else "test"


def _check_same(first: tuple[Path, Sequence[str]] | None, file: Path, names: Sequence[str]) -> None:
    if first is not None and set(first[1]) != set(names):
        odd = sorted(set(first[1]) ^ set(names))
        raise DataError(
            f"{first[0]} and {file} have different columns ({', '.join(odd)} only in one of them), "
            "expected files with the same columns in one folder: move one of them away"
        )


def _separated(file: Path, setting: str, separator: str) -> Iterator[JsonRow]:
    """Rows of CSV or TSV: the first line names the columns, every cell is text."""
    csv.field_size_limit(MAX_LINE)
    line = number = 0
    with open_data(file, setting, "a text file with a header") as stream:
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
        reader = csv.reader(text, delimiter=separator, strict=True)
        try:
            names = next((cells for cells in reader if cells), [])
            _check_header(file, names, separator)
            line = reader.line_num
            for cells in reader:
                first, line = line + 1, reader.line_num
                if not cells:
                    continue
                if len(cells) != len(names):
                    raise DataError(
                        f"{file}:{first} has {len(cells)} cells, expected {len(names)} as in the "
                        f"header {names}: correct this row; text that holds {separator!r}, quotes "
                        'or line ends stands in "quotes"'
                    )
                number += 1
                yield JsonRow(f"{file}:{first}", dict(zip(names, cells, strict=True)))
        except csv.Error as error:
            unclosed = "unexpected end of data" in str(error)
            why = "the file ends inside quotes" if unclosed else error
            raise DataError(
                f"{file}:{line + 1} cannot be read ({why}): correct this row; text that holds "
                f'{separator!r}, quotes or line ends stands in "quotes"'
            ) from error
        except UnicodeDecodeError as error:
            raise DataError(
                f"{file} is not UTF-8 after row {number}: save the file as UTF-8"
            ) from error
    if number == 0:
        raise no_rows(file, separator.join(names) or f"prompt{separator}answer")


def _check_header(file: Path, names: Sequence[str], separator: str) -> None:
    if len(names) == 1:
        for other, kind in ((",", ".csv"), ("\t", ".tsv"), (";", "")):
            if other != separator and other in names[0]:
                fix = f"rename the file to {kind}" if kind else f"save it with {separator!r}"
                raise DataError(
                    f"{file} has one column, {names[0][:60]!r}, whose cells seem to be separated "
                    f"by {other!r}: {fix}"
                )
    odd = next((name for name in names if not name.strip() or names.count(name) > 1), None)
    if odd is not None:
        raise DataError(
            f"{file}:1 has the column {odd!r} twice or without a name, expected a header such as "
            f"prompt{separator}answer: correct the first line"
        )


_json_lines = partial(stream_json_lines, example=EXAMPLE)
_TEXT: dict[str, Reader] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": partial(stream_json, example=EXAMPLE),
    ".csv": partial(_separated, separator=","),
    ".tsv": partial(_separated, separator="\t"),
}
READERS: dict[str, Reader] = {
    **_TEXT,
    ".parquet": lambda file, setting: parquet_rows(file, None, setting),
    ".arrow": arrow_rows,
    ".feather": arrow_rows,
    **{f"{name}.gz": reader for name, reader in _TEXT.items()},
}
TABLES = frozenset({".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet", ".arrow", ".feather"})
PACKED = frozenset({".gz", ".zip", ".tar", ".tgz", ".bz2", ".xz", ".zst", ".7z"})
DESCRIPTIONS = frozenset(
    {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
)
"""Files that the library `datasets` writes next to the rows of a data set."""
