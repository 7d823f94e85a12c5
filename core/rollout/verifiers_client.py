"""Tasksets of verifiers, in the virtual environment that has it: listed, and played.

The program `verifiers_worker.py` runs there under the guard, so that it and the tool servers that
it starts end with this process. It speaks lines of JSON over a socket pair: what a taskset prints
goes to a log, and cannot be taken for an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field

from posttrain.core.contracts import PluginConfig
from posttrain.core.errors import ConfigError, ResourceError
from posttrain.core.rollout import verifiers_worker
from posttrain.core.rollout.external import VariableName
from posttrain.core.runtime import process_guard as guard
from posttrain.core.store.manifests import combine_digests, file_digest, tree_digests

INHERITED = (
    *("HOME", "LANG", "LC_ALL", "LC_CTYPE", "LOGNAME", "PATH", "SHELL", "TERM", "TZ", "USER"),
    *("HF_HOME", "HF_DATASETS_CACHE", "HF_HUB_OFFLINE", "XDG_CACHE_HOME", "SSL_CERT_FILE"),
    *("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"),
)
"""Variables of the run that the worker gets; others may hold secrets: the config names them."""
STOP_S = 3.0
"""Seconds that the worker has to end itself and its tool servers."""
UNNAMED = "name the taskset: `taskset` for an installed one, or its `path`"
MOST_LINE = 1 << 28
MOST_LOG = 8 << 20
TAIL_BYTES = 4096
SHOWN = 300
Json = dict[str, Any]  # Any: JSON values


class VerifiersSource(PluginConfig):
    """Which taskset, and where verifiers is installed."""

    python: str = Field(
        default="",
        description="Python of the virtual environment that has verifiers, or its folder",
    )
    taskset: str | None = Field(
        default=None, min_length=1, description="the taskset's id; null = the name of `path`"
    )
    path: str | None = Field(
        default=None,
        min_length=1,
        description="the taskset's own file or package, or a folder with such, where it is not "
        "installed; what it holds is part of the stage",
    )
    args: dict[str, Any] = Field(  # Any: each taskset has its own settings
        default={}, description="settings of the taskset, as verifiers' `env.taskset`"
    )
    pass_env: tuple[VariableName, ...] = Field(
        default=(), description="variables of the run that the taskset gets, such as keys of judges"
    )
    start_s: float = Field(
        default=120.0,
        gt=0,
        le=290,
        description="seconds that verifiers, and each tool server, may take to start",
    )

    def program(self) -> str:
        """The Python. Raises `ConfigError` where there is none."""
        if not self.python:
            raise ConfigError("verifiers: name the Python that has the package in `python`")
        given = Path(self.python).expanduser().absolute()
        found = given / "bin" / "python" if given.is_dir() else given
        if not os.access(found, os.X_OK) or not found.is_file():
            raise ConfigError(
                f"verifiers: there is no Python '{found}'; make one by python -m venv DIR and "
                "DIR/bin/python -m pip install 'verifiers>=0.4,<0.5', and name it in `python`"
            )
        return str(found)

    def place(self) -> tuple[str, str]:
        """The folder that the taskset is imported from, empty for an installed one, and its id."""
        if self.path is None:
            if self.taskset is None:
                raise ConfigError(f"verifiers: {UNNAMED}")
            return "", self.taskset
        path = Path(self.path).expanduser().absolute()
        if not path.exists():
            raise ConfigError(f"verifiers: there is no '{self.path}'; correct `path`")
        is_module = path.is_file() or (path / "__init__.py").is_file()
        return str(path.parent if is_module else path), self.taskset or path.stem


@dataclass(frozen=True, slots=True)
class Listed:
    """The tasks of a taskset, and a digest of what they and their scores depend on."""

    version: str
    tasks: tuple[Json, ...]
    digest: str


@dataclass
class WorkerProcess:
    """The worker, with a folder of its own and our end of the socket."""

    popen: subprocess.Popen[bytes]
    link: socket.socket
    log: Path

    @classmethod
    def start(cls, source: VerifiersSource, folder: Path) -> WorkerProcess:
        """Raises `ConfigError` for a Python that is not there, `ResourceError` for a variable."""
        program = source.program()
        missing = [name for name in source.pass_env if name not in os.environ]
        if missing:
            raise ResourceError(
                f"verifiers: pass_env names {missing}, which are not set; export them"
            )
        kept = {n: os.environ[n] for n in (*INHERITED, *source.pass_env) if n in os.environ}
        quiet = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "PYTHONDONTWRITEBYTECODE": "1"}
        ours, theirs = socket.socketpair()
        log = folder / "log"
        with theirs, log.open("ab") as written:
            popen = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", guard.__file__, "--tree", str(STOP_S)),
                    *(program, verifiers_worker.__file__, str(theirs.fileno())),
                ],
                stdin=subprocess.PIPE,
                stdout=written,
                stderr=written,
                pass_fds=(theirs.fileno(),),
                env={**kept, **quiet, "TMPDIR": str(folder)},
                cwd=folder,
                start_new_session=True,
            )
        return cls(popen, ours, log)

    def end(self) -> None:
        """Let the guard stop the worker and all that it started; returns at once."""
        assert self.popen.stdin is not None
        self.popen.stdin.close()

    def why(self) -> str:
        """How it ended, with the last line that it wrote."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - TAIL_BYTES))
            said = file.read().decode(errors="replace").strip().splitlines()[-1:]
        code = self.popen.poll()
        how = "ended"
        if code:
            how = f"ended by signal {code - 128}" if code > 128 else f"ended with exit code {code}"
        return f"the worker of verifiers {how}" + "".join(f": {line[:SHOWN]}" for line in said)


def _opening(source: VerifiersSource, **more: object) -> bytes:
    path, taskset = source.place()
    given = {"path": path, "taskset": taskset, "args": source.args, "start_s": source.start_s}
    values = {"agent": {}, "timeout_s": 60.0, "list": False, "limit": None, **given, **more}
    return json.dumps(values).encode() + b"\n"


def _checked(answer: Json) -> Json:
    if "refused" in answer:
        raise ConfigError(f"verifiers: {answer['refused']}")
    return answer


def listed(source: VerifiersSource, limit: int | None) -> Listed:
    """The tasks of a taskset, asked for once in this process while its files stay as they are.

    Raises `ConfigError` in one sentence for whatever is in the way.
    """
    path = Path(source.path).expanduser() if source.path is not None else None
    source.place()
    before = "" if path is None else digest_of(path)
    return _listed(source.model_dump_json(), limit, before)


@functools.lru_cache(maxsize=8)
def _listed(given: str, limit: int | None, files: str) -> Listed:
    source = VerifiersSource.model_validate_json(given)
    with tempfile.TemporaryDirectory(
        prefix="posttrain-verifiers-", ignore_cleanup_errors=True
    ) as made:
        process = WorkerProcess.start(source, Path(made))
        try:
            with process.link as link:
                link.settimeout(source.start_s)
                link.sendall(_opening(source, list=True, limit=limit))
                line = b""
                with contextlib.suppress(ConnectionError):
                    line = link.makefile("rb").readline()
            if not line:
                process.popen.wait(STOP_S)
                raise ConfigError(f"verifiers: {process.why()}")
        except TimeoutError:
            raise ResourceError(
                f"verifiers: the tasks were not listed within {source.start_s:g} s: raise start_s, "
                "or see what the taskset loads"
            ) from None
        finally:
            process.end()
            process.popen.wait()
    answer = _checked(json.loads(line))
    if not answer["tasks"]:
        raise ConfigError(f"verifiers: taskset '{source.place()[1]}' has no tasks")
    digests = {
        "files": files or digest_of(Path(answer["origin"])),
        "version of verifiers " + answer["version"]: "",
    }
    return Listed(answer["version"], tuple(answer["tasks"]), combine_digests(digests))


def digest_of(path: Path) -> str:
    """Digest of a file, or of a folder without what Python writes there itself."""
    if path.is_file():
        return file_digest(path)
    found = tree_digests(path)
    return combine_digests({n: d for n, d in found.items() if "__pycache__" not in n.split("/")})


class WorkerFailed(Exception):
    """Why a worker answers no more."""


@dataclass
class Worker:
    """A worker that plays. Used by one event loop."""

    process: WorkerProcess
    _writer: asyncio.StreamWriter
    _reading: asyncio.Task[None] | None = None
    _waiting: dict[int, asyncio.Future[Json]] = field(default_factory=dict)
    _last: int = 0
    alive: bool = True

    @classmethod
    async def start(
        cls, source: VerifiersSource, folder: Path, *, agent: Json, timeout_s: float
    ) -> Worker:
        """Raises `ConfigError` for a taskset that cannot be played, `ResourceError` if late."""
        process = WorkerProcess.start(source, folder)
        try:
            reader, writer = await asyncio.open_connection(sock=process.link, limit=MOST_LINE)
            writer.write(_opening(source, agent=agent, timeout_s=timeout_s))
            line = b""
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(source.start_s):
                    line = await reader.readline()
            if not line:
                await _ended(process)
                raise ConfigError(f"verifiers: {process.why()}")
            _checked(json.loads(line))
        except TimeoutError:
            process.end()
            raise ResourceError(
                f"verifiers: the taskset was not ready within {source.start_s:g} s: raise start_s, "
                "or see what it loads"
            ) from None
        except BaseException:
            process.end()
            raise
        made = cls(process, writer)
        made._reading = asyncio.create_task(made._read(reader))
        return made

    async def play(self, request: Json) -> Json:
        """The answer to a request to play. Raises `WorkerFailed` where there will be none."""
        self._last += 1
        number = self._last
        answer: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._send({"id": number, **request})
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            self._send({"cancel": number})
            done, _ = await asyncio.wait({answer}, timeout=STOP_S)
            if not done:  # what blocks the worker would hold up every episode
                self.process.end()
            raise
        finally:
            self._waiting.pop(number, None)

    async def close(self) -> None:
        """End the worker and what it started."""
        self._writer.close()
        self.process.end()
        await _ended(self.process)
        if self._reading is not None:
            await asyncio.wait({self._reading}, timeout=STOP_S)

    def _send(self, request: Json) -> None:
        self._writer.write(json.dumps(request).encode() + b"\n")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError, ValueError):
            while line := await reader.readline():
                answer = json.loads(line)
                waiting = self._waiting.get(answer["id"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
                if self.process.log.stat().st_size > MOST_LOG:
                    os.truncate(self.process.log, 0)
        self.alive = False
        self.process.end()
        await _ended(self.process)
        why = WorkerFailed(self.process.why())
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(why)


async def _ended(process: WorkerProcess) -> None:
    while process.popen.poll() is None:
        await asyncio.sleep(0.02)


def without_key(text: str, key: str) -> str:
    """A reason as it may be logged."""
    return re.sub(re.escape(key), "KEY", text)[:SHOWN]
