"""`Sandbox`: choose a level that works here, run programs in it."""

from __future__ import annotations

import base64
import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from posttrain.core.errors import ConfigError, ResourceError
from posttrain.core.sandbox import kernel as seccomp
from posttrain.core.sandbox.job import Job
from posttrain.core.sandbox.model import (
    BETTER,
    LEVELS,
    Level,
    SandboxLimits,
    SandboxResult,
    SandboxSettings,
    Status,
    not_contained,
    strength,
)

# The guard's own start, its kill and the way back, on a busy machine.
_GRACE_S = 20.0
# The guard's interpreter knows no installed packages: it is given where this one is.
_START = """import sys
for name, path in (("posttrain", []), ("posttrain.core", [{core!r}])):
    sys.modules[name] = type(sys)(name)
    sys.modules[name].__path__ = path
from posttrain.core.sandbox.{guard} import main
main()
"""
_PROBE = "import sys; assert sys.version_info >= (3, 8); print('%d.%d.%d' % sys.version_info[:3])"


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python for the programs; `prefixes` are the folders in addition to /usr that it needs."""

    path: str
    prefixes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Probe:
    """Whether a level works on this machine: with which interpreter, or why not."""

    level: Level
    interpreter: Interpreter | None
    detail: str


@dataclass(frozen=True, slots=True)
class Sandbox:
    """Runs Python programs at one level of isolation. Safe to use from several threads."""

    level: Level
    interpreter: Interpreter
    limits: SandboxLimits

    @classmethod
    def best(
        cls, settings: SandboxSettings | None = None, limits: SandboxLimits | None = None
    ) -> Sandbox:
        """The strongest level that works here and that `settings` allows.

        Raises `ResourceError` when there is none, `ConfigError` when `settings` asks for less than
        there is without giving the user's word for it.
        """
        settings = settings or SandboxSettings()
        probes = probe(settings.python)
        works = [found for found in probes if found.interpreter is not None]
        if not works:
            reasons = "; ".join(f"{found.level}: {found.detail}" for found in probes)
            raise ResourceError(
                f"no sandbox for model-written code works here ({reasons}): {BETTER}"
            )
        strongest = works[-1]
        wanted = strongest.level if settings.level == "auto" else settings.level
        chosen = next((found for found in works if found.level == wanted), None)
        if chosen is None:
            why = next(found.detail for found in probes if found.level == wanted)
            raise ResourceError(f"sandbox.level {wanted} does not work here ({why}): {BETTER}")
        if strength(chosen.level) < strength(strongest.level) and not settings.allow_weak:
            raise ConfigError(
                f"sandbox.level {chosen.level} is weaker than {strongest.level}, which works here: "
                "remove the setting, or set sandbox.allow_weak: true"
            )
        if strength(chosen.level) < strength(settings.min_level):
            raise ResourceError(
                f"the strongest sandbox here is {chosen.level}, which does not contain "
                f"{', '.join(not_contained(chosen.level))}, expected {settings.min_level} or "
                f"better: {BETTER}; or, if you trust the programs, set sandbox.min_level: "
                f"{chosen.level} and sandbox.allow_weak: true"
            )
        assert chosen.interpreter is not None
        return cls(chosen.level, chosen.interpreter, limits or SandboxLimits())

    def run(
        self,
        source: str,
        *,
        stdin: bytes | None = None,
        arguments: Sequence[str] = (),
        files: Mapping[str, bytes] | None = None,
        wall_s: float | None = None,
    ) -> SandboxResult:
        """Run `source` as the main program; stdin is empty unless given.

        `files` lie next to it, read-only. `wall_s` replaces the limit of that name. Never raises
        for anything that the program does.
        """
        limits = self.limits
        if wall_s is not None:
            limits = limits.model_copy(update={"wall_s": wall_s})
        # A lone surrogate is not text Python could read either: the program gets a syntax error.
        contents = {**(files or {}), "main.py": source.encode("utf-8", "surrogatepass")}
        if any("/" in name or name in ("", ".", "..") for name in contents):
            raise ValueError(f"files of a sandbox have plain names, got {sorted(contents)}")
        job = replace(self, limits=limits).job(contents)
        job.arguments = list(arguments)
        job.stdin = None if stdin is None else base64.b64encode(stdin).decode()
        return _result(job, self.level)

    def job(self, files: Mapping[str, bytes]) -> Job:
        """What a guard is given to run `main.py` of these files."""
        return Job(
            level=self.level,
            python=self.interpreter.path,
            prefixes=list(self.interpreter.prefixes),
            bwrap=_bwrap() or "",
            arguments=[],
            files={name: base64.b64encode(data).decode() for name, data in files.items()},
            stdin=None,
            **self.limits.model_dump(),
        )


def guard_start(guard: str, core: Path | None = None) -> str:
    """The program by which a bare interpreter becomes the guard of that name."""
    return _START.format(core=str(core or Path(__file__).resolve().parents[1]), guard=guard)


def _result(job: Job, level: Level) -> SandboxResult:
    start = guard_start("guard")
    alive, held = os.pipe()
    try:
        with subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", start, str(alive)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(alive,),
            env={},
            cwd="/",
            start_new_session=True,
        ) as guard:
            try:
                text, trouble = guard.communicate(job.dump(), timeout=job.wall_s + _GRACE_S)
            except subprocess.TimeoutExpired:
                guard.kill()
                return _error(level, f"no answer {_GRACE_S:.0f} s after the time limit")
    except OSError as error:
        return _error(level, f"the guard did not start: {error}")
    finally:
        os.close(alive)
        os.close(held)
    if guard.returncode != 0 or not text:
        last = trouble.decode(errors="replace").strip().splitlines()[-1:]
        return _error(level, f"the guard ended with {guard.returncode}: {' '.join(last)}")
    return _read(json.loads(text), level)


def _read(answer: dict[str, object], level: Level) -> SandboxResult:
    code = answer["exit_code"]
    ended, error = str(answer["ended"]), str(answer["error"])
    stdout, stderr = (base64.b64decode(str(answer[name])) for name in ("stdout", "stderr"))
    seconds = float(str(answer["seconds"]))
    status: Status = "ok" if code == 0 else "nonzero"
    reason = ""
    if ended == "timeout":
        status, reason, code = "timeout", f"ran longer than its {seconds:.1f} s", None
    elif ended in ("memory", "output"):
        status, reason, code = "killed", ended, None
    elif error:
        status = "error"
        reason = f"{error}: {stderr.decode(errors='replace')[-300:].strip()}".strip(": ")
    elif code in (-24, -9):  # SIGXCPU, and SIGKILL at the hard limit or from the kernel
        status, reason = "killed", "cpu" if code == -24 else "signal 9"
    if answer["left"]:
        status, reason = "error", f"{answer['left']} process(es) could not be killed"
    return SandboxResult(
        status, None if code is None else int(str(code)), stdout, stderr, seconds, level, reason
    )


def _error(level: Level, reason: str) -> SandboxResult:
    return SandboxResult("error", None, b"", b"", 0.0, level, reason)


def _bwrap() -> str | None:
    return shutil.which("bwrap", path="/usr/bin:/usr/local/bin:/bin")


def interpreters(python: str | None) -> list[Interpreter]:
    """Candidates, first choice first: the user's, the system's, the one that runs us."""
    system = [shutil.which("python3", path=folder) for folder in ("/usr/bin", "/usr/local/bin")]
    own = os.path.realpath(sys.executable)
    candidates = []
    for path in [python] if python else [*filter(None, system), own]:
        # A virtual environment links to an interpreter elsewhere: both folders are needed.
        folders = {str(Path(name).parents[1]) for name in (path, os.path.realpath(path))}
        extra = tuple(sorted(name for name in folders if not f"{name}/".startswith("/usr/")))
        candidates.append(Interpreter(path, extra))
    return candidates


def probe(python: str | None = None) -> list[Probe]:
    """What really runs here, from the weakest level to the strongest."""
    return list(_probe(python))


@functools.cache
def _probe(python: str | None) -> tuple[Probe, ...]:
    return tuple(_try(level, python) for level in LEVELS)


def _try(level: Level, python: str | None) -> Probe:
    if sys.platform != "linux" or not seccomp.supported():
        return Probe(level, None, "needs Linux on x86-64 or aarch64")
    if level == "bubblewrap" and _bwrap() is None:
        return Probe(level, None, "bwrap is not installed")
    detail = "no python3 found"
    for candidate in interpreters(python):
        done = Sandbox(level, candidate, SandboxLimits()).run(_PROBE)
        if done.status == "ok":
            version = done.stdout.decode().strip()
            return Probe(level, candidate, f"Python {version} at {candidate.path}")
        reason = done.reason or done.stderr.decode(errors="replace").strip()[-200:]
        detail = f"{candidate.path}: {reason or done.status}"
    return Probe(level, None, detail)


def levels_available(python: str | None = None) -> list[Level]:
    return [found.level for found in probe(python) if found.interpreter is not None]
