"""Operations for MLflow that wait in a folder on disk while MLflow is away."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from posttrain.core.runtime.files import write_text
from posttrain.core.store.locks import locked

PENDING = "pending-"
_PLACEHOLDER = re.compile(PENDING + "[0-9a-f]{32}")

Operation = dict[str, Any]
"""`op` is its kind, `what` its name in errors, `run` its MLflow run; the rest depends on the kind.

One that makes something has a `request`: the placeholder for the id that MLflow will give.
"""


def placeholder() -> str:
    return PENDING + uuid.uuid4().hex


OPERATIONS, SENT, ABOUT, REFUSED, FILES = (
    "operations.jsonl",
    "sent.jsonl",
    "about.json",
    "refused.jsonl",
    "files",
)


class Spool:
    """Operations that wait in a folder: one a line, and for each one sent a line in `sent.jsonl`.

    A line is appended in one write, so that a kill can only cut the last one, which is then not
    read. The folder is there while something waits, and while manifests may hold placeholders that
    it knows the ids of: `settle` puts them there. Its lock belongs to the process that uses it.
    """

    def __init__(
        self,
        folder: Path,
        about: Mapping[str, str],
        settle: Callable[[Mapping[str, str]], None] = lambda ids: None,
    ) -> None:
        self.folder = folder
        self.ids: dict[str, str] = {}
        self.waiting = 0
        self._about, self._settle = dict(about), settle
        self._offset = 0
        self._held: ExitStack | None = None
        self._guard = threading.Lock()
        self._kept: set[Path] = set()

    @property
    def in_use(self) -> bool:
        return self._held is not None

    @classmethod
    def found(
        cls,
        folder: Path,
        about: Mapping[str, str],
        settle: Callable[[Mapping[str, str]], None] = lambda ids: None,
    ) -> Spool:
        """What another process left. The caller holds its lock (`lock_path`)."""
        spool = cls(folder, about, settle)
        spool._held = ExitStack()
        for row in _whole_lines(folder / SENT):
            spool._offset = row["offset"]
            spool.ids |= row["ids"]
        path = folder / OPERATIONS
        if path.is_file():
            with path.open("rb") as stream:
                stream.seek(spool._offset)
                for line in stream:
                    if line.endswith(b"\n"):  # a kill can cut the last one
                        json.loads(line)
                        spool.waiting += 1
        return spool

    def keep_file(self, path: Path) -> Path:
        """A copy of a file or folder, which may change or go after this."""
        copy = self.folder / FILES / uuid.uuid4().hex / path.name
        with self._guard:
            self._hold()
            self._kept.add(copy.parent)
        try:
            copy.parent.mkdir(parents=True)
            if path.is_dir():
                shutil.copytree(path, copy)
            else:
                shutil.copyfile(path, copy)
        except OSError:
            shutil.rmtree(copy.parent, ignore_errors=True)
            self._kept.discard(copy.parent)
            raise
        return copy

    def append(self, operations: Iterable[Operation]) -> None:
        with self._guard:
            self._hold()
        lines = [json.dumps(self.resolved(each), default=str) + "\n" for each in operations]
        with (self.folder / OPERATIONS).open("ab", buffering=0) as stream:
            begin = stream.tell()
            content = "".join(lines).encode()
            if stream.write(content) != len(content):
                stream.truncate(begin)
                raise OSError(28, "No space left on device")
        self.waiting += len(lines)

    def first(self) -> Operation:
        with (self.folder / OPERATIONS).open("rb") as stream:
            stream.seek(self._offset)
            return dict(json.loads(stream.readline()))

    def done(self, operation: Operation, made: str) -> None:
        """Note that the first operation is sent, and which id the server gave to what it made."""
        with (self.folder / OPERATIONS).open("rb") as stream:
            stream.seek(self._offset)
            stream.readline()
            self._offset = stream.tell()
        new = {operation["request"]: made} if made and "request" in operation else {}
        self.ids |= new
        line = json.dumps({"offset": self._offset, "ids": new}) + "\n"
        # On a full disk the line is missing: after a kill the operation is then sent twice.
        with contextlib.suppress(OSError), (self.folder / SENT).open("ab", buffering=0) as stream:
            stream.write(line.encode())
        self.waiting -= 1
        self.drop_file(operation)

    def drop_file(self, operation: Operation) -> None:
        """Remove the copy that belongs to an operation that was sent."""
        copy = Path(str(operation.get("file", "")))
        if copy.is_relative_to(self.folder):
            shutil.rmtree(copy.parent, ignore_errors=True)
            self._kept.discard(copy.parent)

    def refuse(self, operation: Operation, why: str) -> None:
        """Put an operation aside that the server does not take."""
        with (self.folder / REFUSED).open("a") as stream:
            stream.write(json.dumps({"why": why, **operation}, default=str) + "\n")

    def resolved(self, value: Any) -> Any:
        """`value` with the ids that MLflow gave in the place of placeholders."""
        if isinstance(value, str):
            if PENDING not in value or not self.ids:
                return value
            return _PLACEHOLDER.sub(lambda found: self.ids.get(found[0], found[0]), value)
        if isinstance(value, Mapping):
            # Content is the user's own, and large.
            return {k: v if k in ("rows", "text") else self.resolved(v) for k, v in value.items()}
        return [self.resolved(each) for each in value] if isinstance(value, list) else value

    def release(self, *, last: bool = False) -> None:
        """Remove what is sent and let go of the folder, unless it is about to be used.

        It stays when something waits or was refused. Ids that MLflow gave stay until the end of the
        run: a stage that is stored now may still have their placeholders.
        """
        with self._guard:
            if self._held is None or (not last and (self._kept or self.waiting)):
                return
            if self.ids and not last:
                if self._offset:
                    self._keep_ids()
                return
            if not self.waiting:
                with contextlib.suppress(OSError):  # a full disk: the next command removes it
                    self.remove()
            self._held.close()
            self._held = None

    def _keep_ids(self) -> None:
        """Of what was sent, keep no more than the ids. A kill in between leaves more than that."""
        (self.folder / OPERATIONS).unlink(missing_ok=True)
        self._offset = 0
        with contextlib.suppress(OSError):
            line = json.dumps({"offset": 0, "ids": self.ids}) + "\n"
            write_text(self.folder / SENT, line)
            self._settle(self.ids)

    def remove(self) -> None:
        """Remove what was sent, with ids that are where they belong; what was refused stays."""
        self._settle(self.ids)
        self._offset = 0
        for name in (OPERATIONS, SENT):
            (self.folder / name).unlink(missing_ok=True)
        if not (self.folder / REFUSED).exists():
            shutil.rmtree(self.folder, ignore_errors=True)

    def _hold(self) -> None:
        if self._held is not None:
            return
        with ExitStack() as stack:
            stack.enter_context(locked(lock_path(self.folder)))
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / ABOUT).write_text(json.dumps(self._about))
            self._held = stack.pop_all()


def lock_path(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.is_file():
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                yield json.loads(line)
