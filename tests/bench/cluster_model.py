"""A model, not a measurement: where one controller saturates as GPUs grow, by discrete events.

    python tests/bench/cluster.py --json > measured.json
    python tests/bench/cluster_model.py measured.json [--json] [--plot model.svg] [--check]

One step of reinforcement learning: the controller sends requests to engines, one after another;
each decodes with a fixed number of places, whose responses have lognormal lengths; the controller
takes each answer, has it scored, calls the ranks, and syncs weights to the engines. With
`max_staleness` k the rollouts of step n may begin with the weights after step n - 1 - k. What the
controller pays for a call is from `measured.json`; the speeds of GPUs are assumptions, printed in
the first line. `--check` compares the model with a toy step that really runs here on actors.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
if str(REPO) not in sys.path:
    sys.path.append(str(REPO))

SIZES = (8, 32, 128, 512, 1024, 2048, 4096)
SIGMA = 0.5
"""Of the logarithm of lengths, where nothing else is said."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds. `request`, `answer` and `rank_call` are the controller's own, for each of them."""

    request: float = 0.0007
    answer: float = 0.0007
    rank_base: float = 0.003
    rank_call: float = 0.0003
    calls_per_step: int = 5
    batch_mb_s: float = 400.0
    token: float = 0.02
    places: int = 64
    update_per_response: float = 0.25
    sync: float = 3.0
    reward: float = 0.02


@dataclass(frozen=True, slots=True)
class Setting:
    """How large it is; half of the GPUs sample and half train."""

    gpus: int
    staleness: int = 0
    sigma: float = SIGMA
    mean_tokens: float = 1000.0
    most_tokens: float = 8000.0
    responses_per_gpu: int = 32
    kb_per_response: float = 40.0
    engine_gpus: int = 1

    @property
    def engines(self) -> int:
        return max(1, self.gpus // 2 // self.engine_gpus)

    @property
    def ranks(self) -> int:
        return max(1, self.gpus // 2)

    @property
    def responses(self) -> int:
        return self.engines * self.responses_per_gpu


class Clock:
    """What happens when: events in the order of their times."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, self._count, event))
        self._count += 1

    def run(self) -> None:
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()


class Controller:
    """Does one thing after another, in the order in which they come."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._free, self.busy = clock, 0.0, 0.0

    def serve(self, seconds: float, then: Callable[[], None]) -> None:
        self._free = max(self._free, self._clock.now) + seconds
        self.busy += seconds
        self._clock.at(self._free, then)


def lengths(setting: Setting, draw: random.Random) -> list[float]:
    """Tokens of each response: lognormal with that mean, cut at the most."""
    mu = math.log(setting.mean_tokens) - setting.sigma**2 / 2
    return [
        min(setting.most_tokens, draw.lognormvariate(mu, setting.sigma))
        for _ in range(setting.responses)
    ]


class Loop:
    """Steps of training: rollouts as far ahead as staleness allows, and one update at a time."""

    def __init__(self, setting: Setting, costs: Costs, steps: int, seed: int) -> None:
        self.setting, self.costs, self.steps = setting, costs, steps
        self.clock = Clock()
        self.controller = Controller(self.clock)
        self.ended: list[float] = []
        self._draw = random.Random(seed)
        self._begun = self._sampled = self._trained = self._synced = 0
        self._learner_idle = True
        self._move()
        self.clock.run()

    def _move(self) -> None:
        """Begin what can begin."""
        sampling = self._begun > self._sampled
        behind = self._begun - self._synced
        if not sampling and self._begun < self.steps and behind <= self.setting.staleness:
            self._begun += 1
            self._sample()
        if self._learner_idle and self._trained < self._sampled:
            self._learner_idle = False
            self._call(self.costs.calls_per_step)

    def _sample(self) -> None:
        setting, costs, clock = self.setting, self.costs, self.clock
        places = [[clock.now] * costs.places for _ in range(setting.engines)]
        left = setting.responses

        def scored() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                clock.at(clock.now + costs.reward, sampled)

        def sampled() -> None:
            self._sampled += 1
            self._move()

        def sent(engine: list[float], tokens: float) -> None:
            end = max(clock.now, heapq.heappop(engine)) + tokens * costs.token
            heapq.heappush(engine, end)
            clock.at(end, partial(self.controller.serve, costs.answer, scored))

        for number, tokens in enumerate(lengths(setting, self._draw)):
            engine = places[number % setting.engines]
            self.controller.serve(costs.request, partial(sent, engine, tokens))

    def _call(self, left: int) -> None:
        """The calls of a step to all ranks, then its batch, then what the ranks compute."""
        setting, costs = self.setting, self.costs
        if left:
            seconds = costs.rank_base + costs.rank_call * setting.ranks
            self.controller.serve(seconds, partial(self._call, left - 1))
            return
        megabytes = setting.responses * setting.kb_per_response / 1000
        computing = costs.update_per_response * setting.responses / setting.ranks

        def computed() -> None:
            self.clock.at(self.clock.now + computing, self._updated)

        self.controller.serve(megabytes / costs.batch_mb_s, computed)

    def _updated(self) -> None:
        self._trained += 1
        self._learner_idle = True

        def synced() -> None:
            self._synced += 1
            self.ended.append(self.clock.now)
            self._move()

        self.clock.at(self.clock.now + self.costs.sync, synced)
        self._move()


def simulate(setting: Setting, costs: Costs, steps: int = 6, seed: int = 0) -> dict[str, float]:
    """Seconds a step after the first, and the share of time that the controller is busy."""
    loop = Loop(setting, costs, steps, seed)
    span = loop.ended[-1] - loop.ended[0]
    return {
        "gpus": setting.gpus,
        "staleness": setting.staleness,
        "sigma": setting.sigma,
        "step_s": span / (steps - 1),
        "controller_busy": loop.controller.busy / loop.ended[-1],
        "responses_per_s_per_gpu": setting.responses * (steps - 1) / span / setting.gpus,
    }


def costs_from(measured: dict[str, Any]) -> Costs:
    """The controller's own time for a call, as measured: a line through the least and most actors.

    Requests and answers of engines are taken to cost it what a call to one more rank does.
    """
    calls = [row for row in measured["calls"] if row["argument"] == "none"]
    empty = {row["actors"]: row["cpu_ms"] / 1e3 for row in calls}
    few, most = min(empty), max(empty)
    slope = max(0.0, (empty[most] - empty[few]) / (most - few))
    moved = [r for r in measured.get("bytes", []) if r["what"].startswith("batch")]
    rate = max((r["mb"] / r["seconds"] for r in moved), default=Costs().batch_mb_s)
    return replace(
        Costs(),
        request=slope,
        answer=slope,
        rank_base=max(0.0, empty[few] - slope),
        rank_call=slope,
        batch_mb_s=rate,
    )


def sweep(costs: Costs) -> list[dict[str, float]]:
    """Sizes by staleness, and sizes by the length of tails."""
    rows = [simulate(Setting(gpus, staleness), costs) for gpus in SIZES for staleness in (0, 1, 4)]
    return rows + [
        simulate(Setting(gpus, 0, sigma), costs) for gpus in SIZES for sigma in (0.0, 1.0)
    ]


def saturation(rows: list[dict[str, float]], staleness: int) -> float:
    """The first size whose GPUs do less than 0.8 of what those of the smallest do."""
    chosen = [r for r in rows if r["staleness"] == staleness and r["sigma"] == SIGMA]
    best = chosen[0]["responses_per_s_per_gpu"]
    return next(
        (r["gpus"] for r in chosen if r["responses_per_s_per_gpu"] < 0.8 * best), float("inf")
    )


def check(costs: Costs, sizes: tuple[int, ...] = (2, 4, 8)) -> list[dict[str, float]]:
    """Steps that really run here, of actors that sleep as long as they would compute."""
    import tempfile
    import time

    from tests.bench.cluster import echoes
    from tests.helpers.cluster import running_cluster
    from tests.helpers.faults import joined
    from tests.helpers.ranks import nothing

    rows = []
    with (
        tempfile.TemporaryDirectory() as name,
        running_cluster(Path(name) / "home", 2, max(sizes)) as cluster,
        joined(cluster.address, cluster.token),
    ):
        for size in sizes:
            small = replace(
                costs, token=0.001, places=2, sync=0.0, reward=0.0, update_per_response=0.02
            )
            setting = Setting(2 * size, 0, 0.5, mean_tokens=100, responses_per_gpu=8)
            predicted = simulate(setting, small)["step_s"]
            group, draw = echoes(size), random.Random(0)
            taken = []
            for step in range(6):
                began = time.perf_counter()
                _sampled(group, lengths(setting, draw), small)
                for _ in range(small.calls_per_step - 1):
                    group.call("nothing", check=nothing)
                batch = b"x" * int(setting.responses * setting.kb_per_response * 1000)
                group.call("take", batch, check=nothing)
                time.sleep(small.update_per_response * setting.responses / size)
                taken += [time.perf_counter() - began] if step else []
            group.close()
            measured = sum(taken) / len(taken)
            rows.append(
                {
                    "engines": size,
                    "predicted_s": predicted,
                    "measured_s": measured,
                    "error": predicted / measured - 1,
                }
            )
    return rows


def _sampled(group: Any, tokens: list[float], costs: Costs) -> None:
    """Each actor sleeps for the responses that it has, in as many places as an engine has."""
    import ray

    actors = group._actors
    waiting = []
    load: list[list[float]] = [[0.0] * costs.places for _ in actors]
    for number, count in enumerate(tokens):
        places = load[number % len(actors)]
        heapq.heapreplace(places, places[0] + count * costs.token)
    slept = [0.0] * len(actors)
    for number in range(len(tokens)):  # an actor has one thread: its calls sleep its makespan
        actor = number % len(actors)
        share = max(load[actor]) / (len(tokens) // len(actors))
        slept[actor] += share
        waiting.append(actors[actor].sleep.remote(share))
    while waiting:
        ready, waiting = ray.wait(waiting, num_returns=1)
        ray.get(ready)


def plot(rows: list[dict[str, float]], path: Path) -> None:
    """Responses a second and GPU over GPUs, of the model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for staleness in (0, 1, 4):
        chosen = [r for r in rows if r["staleness"] == staleness and r["sigma"] == SIGMA]
        axes.plot(
            [r["gpus"] for r in chosen],
            [r["responses_per_s_per_gpu"] for r in chosen],
            marker="o",
            label=f"max_staleness {staleness}",
        )
    axes.set(xscale="log", xlabel="GPUs", ylabel="responses / s / GPU", ylim=(0, None))
    axes.set_title("A model of one controller, not a measurement")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("measured", type=Path, help="what tests/bench/cluster.py --json wrote")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    costs = costs_from(json.loads(options.measured.read_text()))
    found: dict[str, Any] = {"model": True, "costs": asdict(costs), "steps": sweep(costs)}
    found["saturates_at"] = {k: saturation(found["steps"], k) for k in (0, 1, 4)}
    if options.check:
        found["check"] = check(costs)
    if options.plot:
        plot(found["steps"], options.plot)
    if options.json:
        print(json.dumps(found))
        return
    from tests.bench.cluster import show

    print("A MODEL, not a measurement. Costs:", found["costs"])
    show("steps (model)", found["steps"])
    print(
        "\nGPUs from which each does less than 0.8 of what it does among 8, by max_staleness:",
        found["saturates_at"],
    )
    if options.check:
        show("the model against toy steps that ran here", found["check"])


if __name__ == "__main__":
    main()
