"""What the guard is given: one JSON object, checked by nobody but written by `runner` only."""

from __future__ import annotations

import binascii
import json
import os
from collections.abc import Sequence
from types import SimpleNamespace

DEVICES = ("null", "zero", "full", "random", "urandom")
USR_LINKS = ("bin", "lib", "lib32", "lib64", "sbin")
BOX, SCRATCH = "/box", "/tmp"
MIB = 1 << 20
ALTERNATIVES = "/etc/alternatives"
"""Links by which Debian's /usr/bin has awk, cc and other commands; nothing else is in it."""


class Job(SimpleNamespace):
    """One run. `prefixes` are folders in addition to /usr that the interpreter needs.

    With `session` the program is `inside`, which runs commands: it is the first process, and sets
    the limits for each of them. `folders` are more scratch folders, such as /app.

    No dataclass: the guard imports this module, and `dataclasses` would cost it 15 ms a run.
    """

    level: str
    python: str
    prefixes: list[str]
    bwrap: str
    arguments: list[str]
    files: dict[str, str]
    stdin: str | None
    wall_s: float
    cpu_s: int
    memory_mib: int
    processes: int
    file_mib: int
    scratch_mib: int
    open_files: int
    output_kib: int
    session: bool = False
    folders: Sequence[str] = ()

    def dump(self) -> bytes:
        return json.dumps(vars(self)).encode()

    def command(self, box: str) -> list[str]:
        return [self.python, "-B", f"{box}/main.py", *self.arguments]

    def shown(self) -> list[str]:
        """Folders of this machine that are there, read-only."""
        links = [ALTERNATIVES] if self.session and os.path.isdir(ALTERNATIVES) else []
        return ["/usr", *system_folders()[1], *self.prefixes, *links]

    def contents(self) -> dict[str, bytes]:
        return {name: binascii.a2b_base64(text) for name, text in self.files.items()}


def load(text: bytes) -> Job:
    return Job(**json.loads(text))


def environment(scratch: str) -> dict[str, str]:
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": scratch,
        "TMPDIR": scratch,
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "PYTHONINTMAXSTRDIGITS": "0",  # a right answer may have more than 4,300 digits
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONNOUSERSITE": "1",
    }


def system_folders() -> tuple[dict[str, str], list[str]]:
    """Of /bin, /lib and so on: links with where they lead, and folders in their own right."""
    paths = ["/" + name for name in USR_LINKS]
    links = {path: os.readlink(path) for path in paths if os.path.islink(path)}
    return links, [path for path in paths if os.path.isdir(path) and path not in links]
