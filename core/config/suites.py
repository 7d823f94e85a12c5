"""What names a benchmark suite: `lm_eval:TASK[,TASK]`, `inspect:FILE.py[@TASK]`, `held_out`."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from posttrain.core.errors import nearest

Harness = Literal["lm_eval", "inspect", "held_out"]
HARNESSES: tuple[Harness, ...] = ("lm_eval", "inspect", "held_out")
PACKAGES = {"lm_eval": ("lm_eval", "lm-eval"), "inspect": ("inspect_ai", "inspect-ai")}
"""Of a harness: the module that is imported, and the distribution that brings it."""
HELD_OUT = "held_out"
"""The suite that is an evaluation of the run's held-out problems."""
FORMS = "lm_eval:TASK[,TASK], inspect:FILE.py[@TASK] or held_out"


@dataclass(frozen=True, slots=True)
class Suite:
    """A harness with the names of its tasks, or the Python file that has them (`@` names one)."""

    text: str
    harness: Harness
    tasks: tuple[str, ...] = ()
    file: str = ""


def parse_suite(text: str) -> Suite:
    """What `text` names, without a look at files; raises `ValueError` for another form."""
    harness, colon, rest = text.partition(":")
    if text == HELD_OUT:
        return Suite(text, "held_out")
    tasks = tuple(name.strip() for name in rest.split(",") if name.strip())
    if harness == "lm_eval" and tasks:
        return Suite(text, "lm_eval", tasks)
    file, _, task = rest.partition(".py@")
    file = f"{file}.py" if task else rest
    if harness == "inspect" and file.endswith(".py"):
        return Suite(text, "inspect", (task,) if task else (), file)
    hint = "" if colon and harness in HARNESSES else nearest(harness, HARNESSES)
    raise ValueError(f"'{text}' names no suite{hint} (expected {FORMS})")


def installed_version_file(harness: Harness) -> Path | None:
    """The METADATA of the harness's distribution: its version decides results. None: no such."""
    _, package = PACKAGES.get(harness, ("", ""))
    if not package:
        return None
    try:
        installed = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return None
    folder = f"{package.replace('-', '_')}-{installed.version}.dist-info"
    path = Path(str(installed.locate_file(folder))) / "METADATA"
    return path if path.is_file() else None
