"""`Session`: a sandbox that lives on, with files of its own, in which commands run one by one."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import socket
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from posttrain.core.errors import RunError
from posttrain.core.sandbox import inside
from posttrain.core.sandbox.inside import LENGTHS, Header, pack
from posttrain.core.sandbox.job import BOX, MIB, SCRATCH, USR_LINKS
from posttrain.core.sandbox.runner import Sandbox, guard_start
from posttrain.core.sandbox.session_guard import NOT_KILLED

logger = logging.getLogger(__name__)
_OPEN_S = 60.0
_FILES_S = 60.0
_CLOSE_S = 20.0
_ENTRIES_MIB = 16
TAKEN = frozenset(
    {"/usr", "/etc", "/dev", "/proc", "/sys", BOX, *(f"/{name}" for name in USR_LINKS)}
)
"""Folders in / that a session cannot have as its own."""


class SessionLost(RunError):
    """A command has broken its session, whose first process has ended or does not answer."""


class FilesError(RunError):
    """A session's files cannot be written or read as asked: there are too many, or none."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """How a command ended, and what it wrote to stdout and stderr.

    `ok`: exit code 0. `nonzero`: another one, or minus a signal's number. `timeout`: it and its
    process group were killed at the limit. `killed`: all that ran was, for `reason`. In `output`
    `omitted` bytes are left out after `head`.
    """

    status: Literal["ok", "nonzero", "timeout", "killed"]
    exit_code: int | None
    output: bytes
    head: int
    omitted: int
    seconds: float
    reason: str = ""

    def text(self, max_chars: int) -> str:
        """The output, cut in the middle to about `max_chars` characters."""
        parts = self.output[: self.head], self.output[self.head :]
        first, last = (part.decode(errors="replace") for part in parts)
        beyond = len(first) + len(last) - max_chars
        if self.omitted == 0 and beyond <= 0:
            return first + last
        half = max_chars // 2
        if self.omitted == 0:
            first = last = first + last
        first, last = first[:half], last[max(0, len(last) - half) :]
        count = self.omitted + max(0, beyond)
        return f"{first}\n[... {count} characters left out ...]\n{last}"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The files of a session at one time, as a tar file, and its working folder."""

    files: bytes
    cwd: str


class Session:
    """A sandbox that lives until it is closed; one call at a time, in one event loop.

    Its files are in memory, `limits.scratch_mib` at most in /tmp and in each of the folders that it
    was given in /, and vanish with it. `limits` hold for each process of a command, `processes` and
    `memory_mib` for all together, also those that go on in the background. All of them end with the
    session, and with the process that made it.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        folders: tuple[str, ...] = (),
        cwd: str = "/tmp",
        env: Mapping[str, str] | None = None,
    ) -> None:
        """`folders` are made, such as /app; at the level rlimits in the scratch folder instead.
        `cwd` is where the first command runs. `open` starts it."""
        tops = {f"/{Path(name).parts[1]}" for name in folders}
        if taken := sorted(tops & TAKEN):
            raise ValueError(f"{taken[0]} of a sandbox is the system's: use another folder")
        self.mounts = sorted(tops - {SCRATCH})
        self.sandbox, self.folders, self.cwd = sandbox, folders, cwd
        self.env = dict(env or {})
        self._guard: subprocess.Popen[bytes] | None = None
        self._busy = False

    async def open(self, files: bytes = b"") -> None:
        """Start it, with the files of the tar file `files`. Raises `RunError` where it fails."""
        job = self.sandbox.job({"main.py": Path(inside.__file__).read_bytes()})
        job.session = True
        job.folders = self.mounts
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                start = guard_start("session_guard")
                self._guard = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", start, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env={},
                    cwd="/",
                    start_new_session=True,
                )
            self._reader, self._writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
        except BaseException:
            ours.close()
            raise
        try:
            self._writer.write(pack({}, job.dump()))
            begin = {"op": "begin", "folders": self.folders, "env": self.env}
            await self._ask(begin, files, _OPEN_S)
        except BaseException:
            await self.close()
            raise

    async def run(self, command: str, *, wall_s: float | None = None) -> CommandResult:
        """Run a shell command where the last one left off; never raises for what it does.

        But `SessionLost` when it, or one that goes on in the background, ended the session.
        """
        limits = self.sandbox.limits
        wall_s = limits.wall_s if wall_s is None else wall_s
        if "\0" in command:
            text = b"a command has no null characters\n"
            return CommandResult("nonzero", 126, text, len(text), 0, 0.0)
        request = {"op": "run", "command": command, "cwd": self.cwd}
        most = limits.output_kib << 10
        try:
            found, output = await self._ask({**request, "output": most}, b"", wall_s)
        except FilesError as error:  # its first process can start no command
            raise SessionLost(str(error)) from None
        if "exit_code" not in found:
            return CommandResult("killed", None, b"", 0, 0, 0.0, found["killed"])
        self.cwd = found["cwd"]
        code, reason = found["exit_code"], found.get("killed", "")
        status: Literal["ok", "nonzero", "timeout", "killed"] = "ok" if code == 0 else "nonzero"
        if found["late"]:
            status, code, reason = "timeout", None, f"ran longer than its {round(wall_s, 1):g} s"
        elif reason:
            status, code = "killed", None
        return CommandResult(
            status, code, output, found["head"], found["omitted"], found["seconds"], reason
        )

    async def write(self, files: bytes) -> None:
        """Put the files of a tar file there (`archive`). Raises `FilesError` for want of room."""
        await self._ask({"op": "put"}, files, _FILES_S)

    async def read(self, path: str, limit: int) -> bytes:
        """The first `limit` bytes of a file. Raises `FilesError` where there is none."""
        return (await self._ask({"op": "get", "path": path, "limit": limit}, b"", _FILES_S))[1]

    async def snapshot(self) -> Snapshot:
        """All files as they are. Raises `FilesError` where they are too large or too deep."""
        most = self.sandbox.limits.scratch_mib * (1 + len(self.mounts)) + _ENTRIES_MIB
        request = {"op": "snapshot", "limit": most * MIB}
        return Snapshot((await self._ask(request, b"", _FILES_S))[1], self.cwd)

    async def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot: a new sandbox with its files; what ran has ended."""
        await self.close()
        self.cwd = snapshot.cwd
        await self.open(snapshot.files)

    async def fork(self) -> Session:
        """Another session with the same files, opened."""
        snapshot = await self.snapshot()
        made = Session(self.sandbox, folders=self.folders, cwd=snapshot.cwd, env=self.env)
        await made.open(snapshot.files)
        return made

    async def close(self) -> None:
        """Kill all that runs, and free the files; may be called twice."""
        guard, self._guard = self._guard, None
        if guard is None:
            return
        if hasattr(self, "_writer"):
            self._writer.close()
        ends = asyncio.get_running_loop().time() + _CLOSE_S
        while (code := guard.poll()) is None:
            if asyncio.get_running_loop().time() > ends:
                guard.kill()
            await asyncio.sleep(0.005)
        if code == NOT_KILLED:
            logger.warning("a process of a sandbox could not be killed")

    async def _ask(self, request: Header, payload: bytes, wall_s: float) -> tuple[Header, bytes]:
        if self._guard is None:
            raise RunError("the sandbox is closed: open another one")
        if self._busy:
            raise RunError("the sandbox's last call was cut off, or still runs: close it")
        self._busy = True  # stays so when this call is cancelled: its answer would be the next one
        try:
            self._writer.write(pack({**request, "wall_s": wall_s}, payload))
            await self._writer.drain()
            lengths = LENGTHS.unpack(await self._reader.readexactly(LENGTHS.size))
            found = json.loads(await self._reader.readexactly(lengths[0]))
            data = await self._reader.readexactly(lengths[1])
        except (asyncio.IncompleteReadError, ConnectionError):
            raise RunError("the guard of a sandbox is gone: something killed it") from None
        if "lost" in found:
            raise SessionLost(f"the sandbox has ended: {found['lost']}")
        self._busy = False
        if "error" in found:
            raise FilesError(f"files of the sandbox: {found['error']}")
        return found, data


def archive(files: Mapping[str, bytes | Path]) -> bytes:
    """A tar file of these, by their paths inside; a folder with all that it holds.

    Symbolic links stay links. Bytes become files that all may run.
    """
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, what in files.items():
            inner = name.lstrip("/")
            if isinstance(what, Path):
                tar.add(what, inner, filter=_plain)
            else:
                entry = tarfile.TarInfo(inner)
                entry.size, entry.mode = len(what), 0o755
                tar.addfile(entry, io.BytesIO(what))
    return made.getvalue()


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Nobody's, and readable, whatever it was outside; devices and pipes are left out."""
    if not (entry.isreg() or entry.isdir() or entry.issym() or entry.islnk()):
        return None
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mode |= 0o700 if entry.isdir() else 0o600
    return entry
