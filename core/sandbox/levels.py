"""The levels of isolation, and the one table of what each of them contains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
    Capability("kernel surface", _ALL, "system call filter: no mount, ptrace, bpf, io_uring, keys"),
)


def strength(level: Level) -> int:
    return LEVELS.index(level)


def not_contained(level: Level) -> list[str]:
    return [row.name for row in CAPABILITIES if not row.contained(level)]


def table() -> str:
    """The table as Markdown, as docs/sandbox.md shows it."""
    names = LEVELS[::-1]
    lines = [f"| contained | {' | '.join(names)} | how |", "|---" * (len(names) + 2) + "|"]
    for row in CAPABILITIES:
        marks = " | ".join("yes" if row.contained(level) else "**no**" for level in names)
        lines.append(f"| {row.name} | {marks} | {row.how} |")
    return "\n".join(lines)
