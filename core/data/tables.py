"""Rows of Parquet and Arrow files, and of data sets on a hub through the library `datasets`.

No code of a data set is ever run: `datasets` 4 and later has no loading scripts, and what is asked
for here are files of data. Nothing is sent anywhere for files on this machine. Importing this
module needs no torch; `datasets` itself is imported when a hub is read, which takes two seconds.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from posttrain.core.errors import DataError, ResourceError
from posttrain.core.runtime.files import irregular
from posttrain.core.runtime.json_files import JsonRow

HUB_TIMEOUT = 15.0
"""Seconds to wait for the hub's first answer; its library alone would try for half a minute."""


def expand(path: Path, suffix: str, setting: str) -> list[Path]:
    """The file at `path`, or the files with `suffix` in the folder, in the order of their names."""
    place = path.expanduser()
    found = sorted(place.glob(f"*{suffix}")) if place.is_dir() else [place]
    if not found or not all(file.is_file() for file in found):
        what = f"a folder without *{suffix} files" if place.is_dir() else "not there"
        raise DataError(
            f"cannot read {path}, which is {what}, expected a *{suffix} file or a folder of them: "
            f"correct {setting}; relative paths start at {Path.cwd()}"
        )
    return found


BATCH = 64
"""Rows of a table that are Python objects at a time."""


def parquet_rows(path: Path, columns: Sequence[str] | None, setting: str) -> Iterator[JsonRow]:
    """The rows of a Parquet file or of all in a folder, streamed; `columns` None means all."""
    for file in expand(path, ".parquet", setting):
        yield from _table_rows(file, "Parquet", setting, columns, _parquet_batches)


def arrow_rows(file: Path, setting: str) -> Iterator[JsonRow]:
    """The rows of an Arrow file in the file (Feather) or the stream format, streamed."""
    return _table_rows(file, "Arrow", setting, None, _arrow_batches)


Batches = tuple[Any, Iterator[Any]]  # Any: Arrow's schema and record batches, which are untyped


def _parquet_batches(file: Path, columns: Sequence[str] | None) -> Batches:
    from pyarrow import parquet

    found = parquet.ParquetFile(file, memory_map=True)
    return found.schema_arrow, found.iter_batches(BATCH, columns=columns)


def _arrow_batches(file: Path, columns: Sequence[str] | None) -> Batches:
    import pyarrow

    with file.open("rb") as stream:
        is_file = stream.read(6) == b"ARROW1"
    mapped = pyarrow.memory_map(str(file))
    if not is_file:
        reader = pyarrow.ipc.open_stream(mapped)
        return reader.schema, iter(reader)
    table = pyarrow.ipc.open_file(mapped)
    return table.schema, (table.get_batch(i) for i in range(table.num_record_batches))


def _table_rows(
    file: Path,
    kind: str,
    setting: str,
    columns: Sequence[str] | None,
    opened: Callable[[Path, Sequence[str] | None], Batches],
) -> Iterator[JsonRow]:
    import pyarrow

    if not file.exists() or irregular(file):
        what = irregular(file) if file.exists() else "not there"
        raise DataError(
            f"cannot read {file}, which is {what}, expected a {kind} file: correct {setting}; "
            f"relative paths start at {Path.cwd()}"
        )
    damaged = (pyarrow.ArrowException, OSError, ValueError, TypeError, OverflowError)
    try:
        schema, batches = opened(file, columns)
        rounded = {field.name: _as_written(field.type) for field in schema}  # decodes the names
    except damaged as error:
        reported = (_said(error).splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"{file} is not a {kind} file ({reported}): correct {setting}, or use the task that "
            "reads its format"
        ) from error
    _check_columns(file, schema.names, columns)
    number = 0
    try:
        for batch in batches:
            # Arrow files are not checked by their reader, which would read beyond damaged offsets.
            batch.validate(full=True)
            for start in range(0, batch.num_rows, BATCH):
                for values in batch.slice(start, BATCH).to_pylist(maps_as_pydicts="strict"):
                    number += 1
                    for name in values:
                        if (change := rounded[name]) is not None:
                            values[name] = change(values[name])
                    yield JsonRow(f"{file}:{number}", values)
    except damaged as error:
        reported = " ".join(_said(error).split())[:200]
        raise DataError(
            f"{file} cannot be read after row {number} ({reported}): the file is damaged; "
            "write or download it again"
        ) from error
    if number == 0:
        raise DataError(f"{file} has no rows, expected one a problem: give another file")


def _said(error: Exception) -> str:
    """What a library says of a damaged file; Python's words for wrong bytes are not for users."""
    return "text in it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)


def _check_columns(file: Path, known: Sequence[str], wanted: Sequence[str] | None) -> None:
    twice = [name for name in known if known.count(name) > 1]
    if twice:
        raise DataError(f"{file} has two columns '{twice[0]}': rename one of them")
    for column in wanted or ():
        if column not in known:
            raise DataError(
                f"{file} has no column '{column}', only {sorted(known)}: name another field in "
                "the task's settings"
            )


Change = Callable[[Any], Any]  # Any: a cell's value


def _as_written(kind: Any) -> Change | None:  # Any: an Arrow type
    """Makes numbers of less than double precision what was written: 0.1, not 0.10000000149.

    None for types that hold no such numbers.
    """
    import numpy
    from pyarrow import types

    if types.is_float32(kind) or types.is_float16(kind):
        small = numpy.float32 if types.is_float32(kind) else numpy.float16
        return lambda value: value if value is None else float(str(small(value)))
    if types.is_struct(kind):
        made = {kind.field(i).name: _as_written(kind.field(i).type) for i in range(kind.num_fields)}
        changes = {name: change for name, change in made.items() if change is not None}
        if not changes:
            return None
        return lambda value: (
            value
            and {name: changes.get(name, lambda same: same)(item) for name, item in value.items()}
        )
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = _as_written(kind.value_type)
        return None if inner is None else lambda value: value and [inner(item) for item in value]
    return None


@dataclass(frozen=True, slots=True)
class HubSource:
    """A data set on the hub: its id, subset ("" = its only one) and revision (None = newest)."""

    name: str
    subset: str = ""
    revision: str | None = None
    reachable: bool = False

    def __str__(self) -> str:
        subset = f"/{self.subset}" if self.subset else ""
        return f"{self.name}{subset}@{self.revision or 'cached'}"


def resolve_revision(source: HubSource, fix: str) -> HubSource:
    """The source with the commit that its revision stands for now.

    Without a hub it stays as it is, for a copy in the cache. Raises `DataError` for a data set that
    the hub does not have; `fix` says what else can be done.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    _library()
    try:
        found = HfApi().dataset_info(source.name, revision=source.revision, timeout=HUB_TIMEOUT)
    except RepositoryNotFoundError as error:
        raise DataError(
            f"the hub has no data set '{source.name}', or it is private: {fix}"
        ) from error
    except RevisionNotFoundError as error:
        raise DataError(
            f"data set '{source.name}' has no revision '{source.revision}': correct it, or leave "
            "it out for the newest"
        ) from error
    except _network_errors():
        return source
    return replace(source, revision=found.sha, reachable=True)


def hub_rows(
    source: HubSource, split: str, fix: str, *, streaming: bool = False, limit: int | None = None
) -> Iterator[JsonRow]:
    """Rows of one split of a data set on the hub, at most `limit` of them.

    Streaming downloads no more than is read; else the whole split lands in the cache of `datasets`
    and is found there when there is no network. `where` is `id@revision split:row`. Raises
    `ResourceError` with `fix` when the hub cannot be reached and nothing is in the cache.
    """
    library = _library()
    name = f"{source} {split}"
    before = _set_offline(not source.reachable)
    try:
        rows = library.load_dataset(
            source.name,
            source.subset or None,
            split=split,
            revision=source.revision,
            streaming=streaming and source.reachable,
            trust_remote_code=False,
        )
        for number, values in enumerate(itertools.islice(rows, limit), start=1):
            yield JsonRow(f"{name}:{number}", dict(values))
    except (ValueError, FileNotFoundError, library.exceptions.DatasetsError) as error:
        if not source.reachable and not isinstance(error, ValueError):
            raise _unreachable(source, fix, error) from error
        reported = " ".join(str(error).split())[:200]
        raise DataError(
            f"data set '{source.name}', subset '{source.subset}', split '{split}' cannot be read "
            f"({reported}): correct these settings"
        ) from error
    except _network_errors() as error:
        raise _unreachable(source, fix, error) from error
    finally:
        _set_offline(before)


def _unreachable(source: HubSource, fix: str, error: Exception) -> ResourceError:
    return ResourceError(
        f"data set '{source.name}' cannot be read, because the hub cannot be reached and no copy "
        f"of it is in the cache ({type(error).__name__}): {fix}"
    )


def _network_errors() -> tuple[type[Exception], ...]:
    """What every kind of missing network is: `OSError`, and the base of the hub's HTTP library.

    Which library that is depends on the hub's version, so it is asked of the hub's own error.
    """
    from huggingface_hub.errors import HfHubHTTPError

    return tuple(
        base for base in HfHubHTTPError.__mro__ if base.__name__ in ("HTTPError", "OSError")
    )


def _set_offline(offline: bool) -> bool:
    """Whether the libraries may ask the hub; returns what it was.

    A hub that did not answer is not asked again, a dozen times: the cache is looked into at once.
    """
    import datasets
    from huggingface_hub import constants

    before = bool(constants.HF_HUB_OFFLINE)
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = offline
    return before


def _library() -> Any:  # Any: `datasets` is typed in part only
    """The library, without progress bars and without counting downloads or telling of them."""
    import datasets
    from huggingface_hub import constants

    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    constants.HF_HUB_DISABLE_TELEMETRY = True
    datasets.disable_progress_bars()
    # What goes wrong is raised as well, and reported in one sentence by the caller.
    datasets.logging.set_verbosity(logging.CRITICAL)
    return datasets
