"""Task folders in Harbor's form: an instruction, an environment, tests, a solution.

    task.toml            time limits
    instruction.md       what the model reads
    environment/         files, and a Dockerfile that puts them in place
    tests/test.sh        writes /logs/verifier/reward.txt or reward.json, else its exit code counts
    solution/solve.sh    optional

There are no containers: what a Dockerfile does beyond placing files is in `unsupported`.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from posttrain.core.errors import DataError

FOLDER = "folder"
"""The field of a problem's metadata with the path of its task folder."""
TESTS, LOGS, SOLUTION, HOME = "/tests", "/logs", "/solution", "/root"
WORKDIR = "/app"
IMAGES = ("alpine", "busybox", "debian", "python", "ubuntu", "scratch")
"""Images whose tasks find much of the same in the sandbox: its /usr is this machine's."""
_TAG = re.compile(r"[:@].*$")
_IDLE = ("CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL", "HEALTHCHECK")
"""Instructions that change no file."""


@dataclass(frozen=True, slots=True)
class TaskFolder:
    """One task. `files` are where they lie in the sandbox and on this machine.

    `unsupported` are lines of its environment that the sandbox cannot stand in for.
    """

    path: Path
    instruction: str
    agent_s: float
    verifier_s: float
    workdir: str
    env: dict[str, str]
    files: tuple[tuple[str, Path], ...]
    unsupported: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def folders(self) -> tuple[str, ...]:
        """Folders of the sandbox that its files and its working folder need."""
        placed = (str(PurePosixPath(target).parent) for target, _ in self.files)
        return (self.workdir, HOME, *dict.fromkeys(p for p in placed if p != "/"))


def task_folders(path: Path, setting: str) -> list[TaskFolder]:
    """The tasks of a folder of task folders, or the one it is, by name.

    Raises `DataError` that names the folder and what it lacks.
    """
    path = path.expanduser()
    if (path / "task.toml").is_file():
        return [read_task_folder(path)]
    found = sorted(each.parent for each in path.glob("*/task.toml"))
    if not found:
        raise DataError(
            f"{setting}: '{path}' has no task folder, which holds task.toml, instruction.md and "
            "tests/test.sh: name the folder that they are in"
        )
    return [read_task_folder(each) for each in found]


def read_task_folder(path: Path) -> TaskFolder:
    """The task in a folder. Raises `DataError`."""
    for name in ("task.toml", "instruction.md", "tests/test.sh"):
        if not (path / name).is_file():
            raise DataError(f"the task folder {path} has no {name}: add it, or remove the folder")
    try:
        settings = tomllib.loads((path / "task.toml").read_text(encoding="utf-8"))
        instruction = (path / "instruction.md").read_text(encoding="utf-8").strip()
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"the task folder {path} cannot be read: {error}: correct it") from error
    if not instruction:
        raise DataError(f"the task folder {path} has an empty instruction.md: write the task there")
    image = _Image(path / "environment")
    if named := _table(settings, "environment").get("docker_image"):
        image.base(f"docker_image = {named}", str(named))
    return TaskFolder(
        path,
        instruction,
        _seconds(path, settings, "agent"),
        _seconds(path, settings, "verifier"),
        image.workdir,
        image.env,
        tuple(image.files),
        tuple(image.unsupported),
    )


def _table(settings: dict[str, object], name: str) -> dict[str, object]:
    found = settings.get(name, {})
    return found if isinstance(found, dict) else {}


def _seconds(path: Path, settings: dict[str, object], name: str) -> float:
    found = _table(settings, name).get("timeout_sec", 600.0)
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found <= 86_400:
        raise DataError(
            f"{path / 'task.toml'}: [{name}] timeout_sec is {found!r}, expected seconds from 0 to "
            "86400: correct it"
        )
    return float(found)


class _Image:
    """What the files of `environment/` become in a sandbox."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.workdir = folder, WORKDIR
        self.env: dict[str, str] = {}
        self.files: list[tuple[str, Path]] = []
        self.unsupported: list[str] = []
        self.bases = 0
        if not folder.is_dir():
            return
        for other in sorted(folder.glob("*compose*.y*ml")):
            self.unsupported.append(other.name)
        if not (folder / "Dockerfile").is_file():
            self.files = [(f"{WORKDIR}/{each.name}", each) for each in sorted(folder.iterdir())]
            return
        text = (folder / "Dockerfile").read_text(encoding="utf-8", errors="replace")
        for line in _instructions(text):
            word, _, rest = line.partition(" ")
            try:
                done = self._follow(word.upper(), rest.strip())
            except ValueError:  # quotes that do not end
                done = False
            if not done:
                self.unsupported.append(line)

    def base(self, line: str, name: str) -> None:
        """Take note of the image that it begins with."""
        plain = _TAG.sub("", name.rpartition("/")[2])
        self.bases += 1
        if plain not in IMAGES or self.bases > 1:
            self.unsupported.append(line)

    def _follow(self, word: str, rest: str) -> bool:
        """Do as an instruction says; whether that was possible."""
        if word in _IDLE or (word, rest) == ("USER", "root"):
            return True
        if word == "FROM":
            self.base(f"FROM {rest}", rest.split()[0] if rest else "")
            return True
        if word == "WORKDIR":
            return self._go(rest)
        if word == "ENV":
            return self._set(rest)
        return word in ("COPY", "ADD") and self._copy(shlex.split(rest))

    def _go(self, place: str) -> bool:
        target = self._target(place)
        if target is not None:
            self.workdir = target
        return target is not None

    def _set(self, rest: str) -> bool:
        words = shlex.split(rest)
        if words and "=" not in words[0]:
            words = [f"{words[0]}={' '.join(words[1:])}"]
        if "$" in rest or not all("=" in word for word in words):
            return False
        self.env |= {name: value for name, _, value in (word.partition("=") for word in words)}
        return True

    def _copy(self, words: list[str]) -> bool:
        if len(words) < 2 or any(word.startswith(("--", "[", "http")) for word in words):
            return False
        *sources, place = words
        target = self._target(place)
        if target is None:
            return False
        into = place.endswith("/") or place in (".", "./") or len(sources) > 1
        made: list[tuple[str, Path]] = []
        for name in sources:
            source = self.folder / name.lstrip("/")
            inside = source.resolve().is_relative_to(self.folder.resolve())
            if not inside or not source.exists():
                return False
            if source.is_dir():
                entries = (e for e in sorted(source.iterdir()) if e != self.folder / "Dockerfile")
                made += [(f"{target}/{each.name}", each) for each in entries]
            elif into or target == self.workdir:
                made.append((f"{target}/{source.name}", source))
            else:
                made.append((target, source))
        if any(PurePosixPath(where).parent == PurePosixPath("/") for where, _ in made):
            return False  # / itself cannot be written
        self.files += made
        return True

    def _target(self, place: str) -> str | None:
        """The absolute path, where that can be a folder of the sandbox's own."""
        if not place or "$" in place or ".." in PurePosixPath(place).parts:
            return None
        target = PurePosixPath(self.workdir, place)
        taken = ("usr", "etc", "bin", "sbin", "lib", "lib32", "lib64", "dev", "proc", "sys", "box")
        own = (*taken, *(name[1:] for name in (TESTS, LOGS, SOLUTION)))
        return None if len(target.parts) < 2 or target.parts[1] in own else str(target)


def _instructions(text: str) -> Iterator[str]:
    """Lines of a Dockerfile, comments left out and continued lines joined."""
    parts: list[str] = []
    for line in text.splitlines():
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        parts.append(line.removesuffix("\\").strip())
        if not line.endswith("\\"):
            yield " ".join(parts)
            parts = []
    if parts:
        yield " ".join(parts)
