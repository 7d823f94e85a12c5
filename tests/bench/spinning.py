"""How long torch's threads should spin before they sleep: settings in turn, alone and crowded.

Runs the work once per setting and round, in an order that alternates, first alone, then with busy
processes at the same time, and prints the median wall time and processor time of each. The work is
a stack of small layers (updates and one-token passes, as in a step of the quickstart), or a command
of yours after `--`.

    python tests/bench/spinning.py [--busy 8] [--rounds 5] [--settings default bounded passive]
    python tests/bench/spinning.py -- python tests/bench/learner.py --ways stream --rounds 2

A setting is `default` (libgomp's own, 300,000 spins), `bounded` (what posttrain sets), `passive`
(OMP_WAIT_POLICY=PASSIVE) or a number of spins.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from posttrain.core.runtime.startup import SPIN_COUNT, WAIT_POLICY, bounded_waiting

BUSY = "while True: sum(range(10_000))"


def variables(setting: str) -> dict[str, str]:
    """What a setting adds to the environment."""
    if setting == "passive":
        return {WAIT_POLICY: "PASSIVE"}
    if setting == "bounded":
        return bounded_waiting({})
    return {} if setting == "default" else {SPIN_COUNT: setting}


def measure(command: Sequence[str], setting: str) -> tuple[float, float]:
    """Seconds of wall time and of processor time of one run."""
    clean = {k: v for k, v in os.environ.items() if k not in (WAIT_POLICY, SPIN_COUNT)}
    # An empty policy is libgomp's default, and keeps a command of ours from setting its own.
    explicit = {WAIT_POLICY: ""} if setting == "default" else variables(setting)
    began = time.monotonic()
    process = subprocess.Popen(
        command, env=clean | explicit, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed with status {status}")
    return time.monotonic() - began, used.ru_utime + used.ru_stime


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """As many processes that want a core each."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def work(steps: int) -> None:
    """Updates of a stack of layers over 128 tokens, each followed by passes over 8 tokens."""
    import torch

    torch.manual_seed(0)
    sizes = ((576, 1536), (1536, 576))
    layers = [torch.nn.Linear(*size) for _ in range(8) for size in sizes]
    stack = torch.nn.Sequential(*(m for layer in layers for m in (layer, torch.nn.SiLU())))
    many, few = torch.randn(128, 576), torch.randn(8, 576)
    optimizer = torch.optim.AdamW(stack.parameters(), lr=1e-4)
    for _ in range(steps):
        stack(many).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for _ in range(16):
                stack(few)


def table(command: Sequence[str], settings: Sequence[str], rounds: int, title: str) -> None:
    """Print one table."""
    print(f"{title} (load {os.getloadavg()[0]:.1f})", flush=True)
    found: dict[str, list[tuple[float, float]]] = {setting: [] for setting in settings}
    for number in range(rounds):
        for setting in settings if number % 2 == 0 else reversed(settings):
            found[setting].append(measure(command, setting))
    for setting, pairs in found.items():
        wall, cpu = (statistics.median(column) for column in zip(*pairs, strict=True))
        low, high = min(wall for wall, _ in pairs), max(wall for wall, _ in pairs)
        print(
            f"  {setting:>9}  wall {wall:7.2f} s ({low:.2f} to {high:.2f})  processor {cpu:7.2f} s",
            flush=True,
        )


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--settings", nargs="+", default=["default", "bounded", "passive"])
    parser.add_argument("--busy", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["alone", "crowded"])
    parser.add_argument("--work", type=int, help="do the work, this many steps, in this process")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("command", nargs="*", help="after --: the work instead of ours")
    options = parser.parse_args()
    if options.work:
        work(options.work)
        return
    command = options.command or [sys.executable, __file__, "--work", str(options.steps)]
    if options.only != "crowded":
        table(command, options.settings, options.rounds, "alone")
    if options.only != "alone":
        with neighbours(options.busy):
            table(command, options.settings, options.rounds, f"with {options.busy} busy processes")


if __name__ == "__main__":
    main()
