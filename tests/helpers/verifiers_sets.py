"""Tasksets of verifiers with planted faults, and a virtual environment that has the package."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

PACKAGE = "verifiers==0.4.0"
SUMS = '''
"""Sums, with a tool that adds; KIND says what goes wrong."""

import asyncio
import os
import sys

import verifiers.v1 as vf

KIND = "{kind}"
if KIND == "dead tool" and __name__ == "__main__":
    sys.exit("no licence")
if KIND == "deaf tool" and __name__ == "__main__":
    import time
    time.sleep(100)


class Data(vf.TaskData):
    answer: str


class Adder(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        if KIND == "hanging tool":
            await asyncio.sleep(100)
        return a + b


class Sum(vf.Task[Data]):
    @vf.reward(weight=0.5)
    async def right(self, trace) -> float:
        if KIND == "broken reward" and self.data.idx % 2:
            raise ZeroDivisionError("no such number")
        if KIND == "killed" and self.data.idx % 2:
            os.kill(os.getpid(), 9)
        if KIND == "blocking reward" and self.data.idx % 2:
            import time
            time.sleep(100)
        return float(self.data.answer in (trace.last_reply or ""))

    @vf.reward(weight=0.25)
    async def short(self, trace) -> float:
        return float(len(trace.last_reply or "") < 20)

    @vf.metric
    async def letters(self, trace) -> float:
        return float(len(trace.last_reply or ""))

    @classmethod
    def toolsets(cls, config):
        return [Adder(vf.ToolsetConfig())] if "tool" in KIND else []


class Config(vf.TasksetConfig):
    count: int = {count}


class Sums(vf.Taskset[Sum, Config]):
    INFINITE = KIND == "endless"

    def load(self):
        if KIND == "offline":
            raise ConnectionError("hub.invalid cannot be reached")
        a = 0
        while a < self.config.count or self.INFINITE:
            made = Data(prompt=f"{{a % 4}}+{{a // 4}}", answer=str(a % 4 + a // 4))
            yield Sum(made, self.config.task)
            a += 1


__all__ = ["Sums"]
if __name__ == "__main__":
    Adder.run()
'''


def write_sums(folder: Path, kind: str = "plain", count: int = 40) -> Path:
    """A taskset `sums` in a file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "sums.py"
    path.write_text(SUMS.format(kind=kind, count=count))
    return path


@functools.cache
def venv_with_verifiers(folder: Path) -> str:
    """The Python of a virtual environment with verifiers; empty where it cannot be installed."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    made = folder / "bin" / "python"
    pip = [made, "-m", "pip", "install", "-q", PACKAGE]
    done = subprocess.run(pip, capture_output=True, timeout=500)
    return "" if done.returncode else str(made)
