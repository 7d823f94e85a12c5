"""A listener that kills its own process, as `kill -9` does, at one step of a stage or after it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path

from posttrain.core.hooks import hookimpl

WHERE = "KILLED_AT"
"""Environment variable with `stage:step`, or `stage:step:seconds` for so long after the step."""


@hookimpl
def posttrain_on_step_end(stage: str, step: int, metrics: Mapping[str, float]) -> None:
    where, _, seconds = os.environ.get(WHERE, "").removeprefix(f"{stage}:").partition(":")
    if not os.environ.get(WHERE, "").startswith(f"{stage}:") or where != str(step):
        return
    if not seconds:
        os.kill(os.getpid(), signal.SIGKILL)
    later = threading.Timer(float(seconds), os.kill, (os.getpid(), signal.SIGKILL))
    later.daemon = True
    later.start()


def install(folder: Path) -> str:
    """Make the listener a package of `folder`; returns the PYTHONPATH that loads it."""
    info = folder / "killer-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: killer\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[posttrain.plugins]\nkiller = posttrain_killer\n")
    (folder / "posttrain_killer.py").write_text(Path(__file__).read_text())
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
