"""Short runs of a tiny model whose ranks and nodes are killed at random, and what they end in."""

from __future__ import annotations

import contextlib
import random
import subprocess
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from posttrain.core.cluster.group import RankLost
from posttrain.core.cluster.on_ray.ranks import RankResources, RayRanks
from tests.helpers.cluster import Cluster
from tests.helpers.pipeline import start_command
from tests.helpers.ranks import LIGHT, nothing

STEPS, CHECKPOINT_EVERY, RANKS = 12, 3, 3
LIMIT_S = 240.0
"""What a run may take, with all that strikes it."""
KINDS = ("rank", "ranks", "term", "raylet", "node")
WEIGHTS = (8, 6, 3, 1, 1)


class Hung(Exception):
    """A run that has not ended in time."""


@dataclass
class Tally:
    """What came of the runs so far."""

    runs: int = 0
    strikes: Counter[str] = field(default_factory=Counter)
    killed: int = 0
    wrong: int = 0
    hung: int = 0
    errors: list[str] = field(default_factory=list)
    with_fewer: int = 0
    seconds: list[float] = field(default_factory=list)


def undisturbed() -> dict[str, Tensor]:
    """The weights of a run that nothing strikes."""
    ranks = RayRanks(RANKS, LIGHT, {"OMP_NUM_THREADS": "1"}, RankResources(1, 0, RANKS, 120))
    ranks.start(None, nothing)
    for _ in range(STEPS):
        ranks.call("update", check=nothing)
    found: dict[str, Tensor] = ranks.call("weights", check=nothing)
    ranks.close()
    return found


class Strikes:
    """Kills processes of the cluster at random times until it is stopped."""

    def __init__(self, cluster: Cluster, draw: random.Random, count: int, tally: Tally) -> None:
        self._cluster, self._draw, self._tally = cluster, draw, tally
        self._left, self._stopped = count, threading.Event()
        self._repair: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Strikes:
        self._thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._stopped.set()
        self._thread.join()
        if self._repair is not None:
            self._repair.communicate(timeout=120)
            self._cluster.up()  # what ended later

    @property
    def are_over(self) -> bool:
        return self._left == 0

    def _run(self) -> None:
        while self._left:
            # Some strike while ranks start, which takes seconds, some in the midst of a step.
            if self._stopped.wait(self._draw.uniform(0.0, 6.0)):
                return
            actors = self._cluster.actors()
            if not actors:
                continue
            kind = self._draw.choices(KINDS, WEIGHTS)[0]
            with contextlib.suppress(psutil.Error, AssertionError):  # gone by itself meanwhile
                self._tally.killed += self._strike(kind, actors)
                self._tally.strikes[kind] += 1
                self._left -= 1

    def _strike(self, kind: str, actors: list[psutil.Process]) -> int:
        """How many ranks it ends."""
        one = self._draw.choice(actors)
        if kind in ("rank", "term"):
            one.kill() if kind == "rank" else one.terminate()
            return 1
        if kind == "ranks":
            chosen = self._draw.sample(actors, self._draw.randint(1, len(actors)))
            for process in chosen:
                process.kill()
            return len(chosen)
        number = self._cluster.node_of(one)
        if number == 0:  # the head: a test of its own
            one.kill()
            return 1
        there = sum(self._cluster.node_of(actor) == number for actor in actors)
        if kind == "raylet":
            next(p for p in one.parents() if "raylet" in p.name()).kill()
        else:
            self._cluster.end_node(number)
        if self._repair is None or self._repair.poll() is not None:
            shape = ("--nodes", str(self._cluster.nodes), "--cpus", str(self._cluster.cpus))
            self._repair = start_command(
                *("cluster", "up", *shape, "--port", str(self._cluster.port)),
                *("--home", str(self._cluster.home), "--json"),
            )
        return there


def struck_run(
    cluster: Cluster, folder: Path, seed: int, count: int, wanted: dict[str, Tensor], tally: Tally
) -> None:
    """One run that is struck `count` times, resumed after each, and compared in the end."""
    draw, began = random.Random(seed), time.monotonic()
    folder.mkdir()
    sizes: set[int] = set()

    def check() -> None:
        if time.monotonic() - began > LIMIT_S:
            raise Hung(f"seed {seed}")

    found: dict[str, Tensor] | None = None
    with Strikes(cluster, draw, count, tally) as strikes:
        while found is None:
            try:
                found = _attempt(folder, strikes, sizes, check)
            except RankLost:
                continue
            except Hung:
                tally.hung += 1
                break
            except Exception as error:  # counted, and the next run goes on
                tally.errors.append(f"seed {seed}: {type(error).__name__}: {str(error)[:300]}")
                break
    tally.runs += 1
    tally.seconds.append(time.monotonic() - began)
    if found is None:
        return
    if sizes == {RANKS}:
        equal = all(torch.equal(found[name], one) for name, one in wanted.items())
    else:
        tally.with_fewer += 1
        equal = all(torch.allclose(found[name], one, atol=1e-9) for name, one in wanted.items())
    tally.wrong += not equal


def _attempt(folder: Path, strikes: Strikes, sizes: set[int], check: Any) -> dict[str, Tensor]:
    """From the newest checkpoint to the end; it does not end before all strikes came."""
    ranks = RayRanks(RANKS, LIGHT, {"OMP_NUM_THREADS": "1"}, RankResources(1, 0, 1, 120, 60))
    try:
        ranks.start(None, check)
        saved = sorted(folder.glob("*.safetensors"))
        step = int(saved[-1].stem) if saved else 0
        if saved:
            ranks.call("read", saved[-1], step, check=check)
        while step < STEPS or not strikes.are_over:
            if step == STEPS:
                ranks.call("wait", 0.1, check=check)
                continue
            ranks.call("update", check=check)
            sizes.add(ranks.size)
            step += 1
            if step % CHECKPOINT_EVERY == 0:
                ranks.call("write", folder / f"{step:06d}.safetensors", check=check)
            time.sleep(0.1)
        found: dict[str, Tensor] = ranks.call("weights", check=check)
        return found
    finally:
        ranks.close()
