"""What one run in the sandbox costs: `python tests/bench/sandbox.py [--runs 30]`.

Prints, per level, the median and the least wall time of running an empty program, of opening and
closing a session, and of a command in one; and the wall time of the bare interpreter.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import time
from collections.abc import Callable

from posttrain.core.sandbox.model import SandboxLimits
from posttrain.core.sandbox.runner import Sandbox, probe
from posttrain.core.sandbox.session import Session


def times(action: Callable[[], object], runs: int) -> list[float]:
    """Seconds of each run, after one that is not counted."""
    found = []
    for _ in range(runs + 1):
        began = time.monotonic()
        action()
        found.append(time.monotonic() - began)
    return found[1:]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=30)
    runs = parser.parse_args().runs
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, {runs} runs")
    python = ""
    for found in probe():
        if found.interpreter is None:
            print(f"{found.level}: not there ({found.detail})")
            continue
        python = found.interpreter.path
        box = Sandbox(found.level, found.interpreter, SandboxLimits())
        seconds = times(lambda box=box: box.run(""), runs)  # type: ignore[misc]
        show(found.level, seconds)
        asyncio.run(show_sessions(box, runs))
    if python:
        show("bare python", times(lambda: subprocess.run([python, "-c", ""], check=True), runs))


async def show_sessions(box: Sandbox, runs: int) -> None:
    """Two lines: a session from its beginning to its end, and a command."""
    whole, commands = [], []
    for _ in range(runs):
        began = time.monotonic()
        session = Session(box)
        await session.open()
        await session.close()
        whole.append(time.monotonic() - began)
    await session.open()
    for _ in range(runs):
        began = time.monotonic()
        await session.run("true")
        commands.append(time.monotonic() - began)
    await session.close()
    show(f"{box.level}, a session", whole)
    show(f"{box.level}, a command in one", commands)


def show(name: str, seconds: list[float]) -> None:
    """One line."""
    median, least = statistics.median(seconds), min(seconds)
    print(f"{name}: median {median * 1000:.0f} ms, least {least * 1000:.0f} ms")


if __name__ == "__main__":
    main()
