"""Blocks of Markdown pages that a test runs, and a `posttrain` that takes a tiny model instead.

`<!-- file: NAME -->` before a block writes it to NAME, `<!-- run -->` runs it line by line;
`<!-- run ARGUMENTS -->` appends the arguments to each line, so that it takes seconds.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from posttrain.core.kit.tiny import make_tiny_model
from tests.helpers.pipeline import environment

BLOCK = re.compile(
    r"^<!-- (file|run|config)(?:: ?| )?([^\n]*?) ?-->\n```\w+\n(.*?)^```$", re.M | re.S
)
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMALL = ("--set", "limits.num_threads=1", "--set", "model.dtype=float32")


@dataclass(frozen=True)
class Block:
    """A marked block: what is done with it, the rest of the mark, and its text."""

    does: str
    argument: str
    text: str


def blocks(page: Path) -> list[Block]:
    """The marked blocks of a page, in order."""
    return [Block(*found) for found in BLOCK.findall(page.read_text("utf-8"))]


def run_page(page: Path, folder: Path) -> list[str]:
    """Do in `folder` what the page says; what its commands printed. A failure is an error."""
    make_tiny_model(folder / "tiny")
    printed = []
    for block in blocks(page):
        text = block.text.replace(MODEL, "tiny")
        if block.does == "file":
            (folder / block.argument).write_text(text, "utf-8")
        elif block.does == "run":
            for line in text.splitlines():
                more = block.argument.replace(MODEL, "tiny")
                printed.append(run_line(f"{line} {more}".split("   #")[0], folder))
    return printed


def run_line(line: str, folder: Path) -> str:
    """One command of a page."""
    words = shlex.split(line)
    runs = sorted((folder / ".posttrain" / "runs").glob("*/run.json"), key=os.path.getmtime)
    words = [runs[-1].parent.name if word == "RUN" else word for word in words]
    program, *arguments = words
    if program == "posttrain":
        words = [sys.executable, "-m", "posttrain.pipelines.cli", *arguments]
        if arguments[0] in ("run", "plan", "validate"):
            source = ["--set", "model.source=tiny"] if "quickstart" in arguments else []
            words += [*SMALL, *source]
    else:
        assert program == "python", line
        words = [sys.executable, *arguments]
    done = subprocess.run(
        words, cwd=folder, capture_output=True, text=True, timeout=300, env=environment()
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout
