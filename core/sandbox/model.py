"""What a sandbox is asked, what it answers, and what each level of isolation contains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field, model_validator

from posttrain.core.runtime.config_model import ConfigModel

Level = Literal["rlimits", "namespaces", "bubblewrap"]
LEVELS: tuple[Level, ...] = ("rlimits", "namespaces", "bubblewrap")
"""From the weakest to the strongest."""

BETTER = (
    "install bubblewrap (Debian, Ubuntu: apt-get install bubblewrap; Fedora: dnf install "
    "bubblewrap), and in a container allow user namespaces"
)


@dataclass(frozen=True, slots=True)
class Capability:
    """One thing that model-written code might do, and the levels at which it cannot."""

    name: str
    at: frozenset[Level]
    how: str

    def contained(self, level: Level) -> bool:
        """Whether `level` claims to contain it; the escape tests hold it to that."""
        return level in self.at


_ALL: frozenset[Level] = frozenset(LEVELS)
_NAMED: frozenset[Level] = frozenset({"namespaces", "bubblewrap"})

CAPABILITIES: tuple[Capability, ...] = (
    Capability("files", _NAMED, "only /usr, five devices and the scratch folder exist"),
    Capability(
        "writes", _NAMED, "all is read-only but a scratch folder in memory, limited in size"
    ),
    Capability("network", _ALL, "own network namespace; at rlimits socket() is refused"),
    Capability("signals", _NAMED, "own process namespace; at rlimits only where started by root"),
    Capability("host processes", _NAMED, "own process namespace, and no /proc"),
    Capability("environment", _ALL, "the program gets a fresh one"),
    Capability("descriptors", _ALL, "all but stdin, stdout and stderr are closed"),
    Capability("process tree", _ALL, "killed whole: namespace, own uid, child subreaper"),
    Capability("fork bomb", _ALL, "RLIMIT_NPROC, under an own uid or user namespace"),
    Capability("memory", _ALL, "RLIMIT_AS per process; resident sum of all, looked at every 50 ms"),
    Capability("cpu", _ALL, "RLIMIT_CPU per process"),
    Capability("wall clock", _ALL, "deadline in the guard process"),
    Capability("output", _ALL, "counted in the guard process"),
    Capability("file size", _ALL, "RLIMIT_FSIZE"),
    Capability("open files", _ALL, "RLIMIT_NOFILE"),
    Capability(
        "kernel surface",
        _ALL,
        "system call filter: no mount, ptrace, bpf, io_uring, keys; sockets of AF_UNIX only",
    ),
)

SESSIONS: tuple[Capability, ...] = (
    Capability("state between commands", _ALL, "files and the working folder"),
    Capability("folders such as /app", _NAMED, "file systems of its own, in memory"),
    Capability("total size of files", _NAMED, "`scratch_mib` in /tmp, and in each of its folders"),
    Capability("snapshots", _ALL, "a copy of its folders: to go back, or for another session"),
    Capability(
        "its first process",
        _NAMED,
        "no command can kill or stop it; at rlimits another one is started, with the same files",
    ),
)
"""What holds for a sandbox that lives on, in addition."""


def strength(level: Level) -> int:
    return LEVELS.index(level)


def not_contained(level: Level) -> list[str]:
    return [row.name for row in CAPABILITIES if not row.contained(level)]


def table() -> str:
    """The table as Markdown, as docs/sandbox.md shows it."""
    return _table("contained", CAPABILITIES)


def sessions_table() -> str:
    """The same for what holds for sessions."""
    return _table("of a session", SESSIONS)


def _table(title: str, rows: tuple[Capability, ...]) -> str:
    names = LEVELS[::-1]
    lines = [f"| {title} | {' | '.join(names)} | how |", "|---" * (len(names) + 2) + "|"]
    for row in rows:
        marks = " | ".join("yes" if row.contained(level) else "**no**" for level in names)
        lines.append(f"| {row.name} | {marks} | {row.how} |")
    return "\n".join(lines)


Status = Literal["ok", "nonzero", "timeout", "killed", "error"]


class SandboxLimits(ConfigModel):
    """Limits of one run. Memory counts per process (address space) and in sum (resident)."""

    wall_s: float = Field(default=10.0, gt=0, le=86_400, description="seconds by the clock")
    cpu_s: int = Field(default=5, ge=1, le=86_400, description="CPU seconds, per process")
    memory_mib: int = Field(
        default=512, ge=64, le=16_777_216, description="MiB, per process and in sum"
    )
    processes: int = Field(
        default=16, ge=1, le=100_000, description="processes and threads at once"
    )
    file_mib: int = Field(default=16, ge=1, le=16_777_216, description="MiB of one file")
    scratch_mib: int = Field(
        default=32, ge=1, le=16_777_216, description="MiB in the scratch folder"
    )
    open_files: int = Field(
        default=64, ge=16, le=1_000_000, description="descriptors of one process"
    )
    output_kib: int = Field(
        default=256, ge=1, le=4_194_304, description="KiB of stdout, and as much of stderr"
    )


class SandboxSettings(ConfigModel):
    """Which isolation is wanted, and the user's word where it may be weak."""

    level: Literal["auto", "bubblewrap", "namespaces", "rlimits"] = Field(
        default="auto", description="auto: the strongest that works here"
    )
    min_level: Level = Field(default="namespaces", description="refuse to run below this one")
    allow_weak: bool = Field(
        default=False,
        description="your word that a level below the strongest here, or one that does not hide "
        "files, will do",
    )
    python: str | None = Field(
        default=None, description="interpreter of the programs; null = the system's python3"
    )

    @model_validator(mode="after")
    def _weakness_is_wanted(self) -> SandboxSettings:
        if "rlimits" in (self.level, self.min_level) and not self.allow_weak:
            raise ValueError(
                "the level rlimits hides no files from the program: set allow_weak: true if you "
                "trust the programs that far, or choose namespaces or bubblewrap"
            )
        return self


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """How one program ended.

    `ok`: exit code 0. `nonzero`: another exit code, or a signal of its own. `timeout`: the wall
    clock. `killed`: `reason` is `memory`, `cpu` or `output`. `error`: the sandbox itself failed,
    `reason` says how, and nothing is known of the program. A signal is minus its number in
    `exit_code`. Output beyond the limit is cut. What was written to the scratch folder is gone.
    """

    status: Status
    exit_code: int | None
    stdout: bytes
    stderr: bytes
    seconds: float
    level: Level
    reason: str = ""
