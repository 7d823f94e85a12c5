"""A whole GRPO step, ours and TRL's in turn in one run; prints one JSON line.

Each contestant is a process of its own that waits for its turn before every step, so that a busy
machine slows all of them alike. Ours is the real command with Prefect and MLflow; TRL is its
GRPOTrainer, `fastest` (eager attention, large micro-batches, no gradient checkpointing, tcmalloc as
ours where it is installed), `thresholds` (the same, under a glibc that keeps large buffers) or
`documented` (its defaults, and the system's). Same model, prompts, group size and precision; every
response has the full length, so that all do the same work. A step lasts from the word to begin
until the next step would begin. Ours keeps float32 master weights, TRL does not. Over 300 lines
because both sides are set up here, one next to the other.

TRL is not a dependency; put it in a folder of its own:

    pip install --no-deps --target .posttrain/trl trl==1.16.0
    python tests/bench/step.py --json --trl .posttrain/trl
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
if str(REPO) not in sys.path:
    sys.path.append(str(REPO))

from posttrain.core.config.sections import ModelSection  # noqa: E402
from posttrain.core.contracts import Task  # noqa: E402
from posttrain.core.models.source import obtain  # noqa: E402
from posttrain.core.plugin_manager import PluginManager  # noqa: E402
from posttrain.core.rollout.vllm_model import vllm_version  # noqa: E402
from posttrain.core.runtime.startup import find_allocator, preloaded  # noqa: E402
from tests.bench.step_baton import ENVIRONMENT, Contestant  # noqa: E402
from tests.helpers.learning import Learned  # noqa: E402
from tests.helpers.pipeline import COMMAND, prepared, write_config  # noqa: E402

CONTESTANTS = (
    "ours-vllm",
    "ours-transformers",
    "trl-fastest",
    "trl-thresholds",
    "trl-documented",
)
FAST = ("fastest", "thresholds")
QUESTION = "What is {a}{op}{b}? Answer with the number only."
PHASES = ("score", "advantage", "update", "sync", "sync_check", "tracking")
# A rollout engine that waits for its turn, and ends no response before its full length.
PLUGINS = '''
from dataclasses import replace

from posttrain.core.hooks import hookimpl
from posttrain.plugins.engines.transformers import TransformersEngine
from posttrain.plugins.engines.vllm import VllmEngine
from tests.bench.step_baton import Baton


class InTurn:
    """Waits before it samples, but for the check of its log-probs when it starts."""

    baton = None
    started = False

    def start(self, setup):
        super().start(replace(setup, stop_token_ids=()))
        self.started = True

    def generate(self, prompts, params):
        if self.started:
            self.baton = self.baton or Baton()
            self.baton.wait()
        return super().generate(prompts, params)


class VllmInTurn(InTurn, VllmEngine):
    """The vLLM engine, in turn."""

    name = "vllm_in_turn"


class TransformersInTurn(InTurn, TransformersEngine):
    """The transformers engine, in turn."""

    name = "transformers_in_turn"


@hookimpl
def posttrain_register():
    return [VllmInTurn, TransformersInTurn]
'''


@dataclass
class Side:
    """A contestant's process and what was seen of it."""

    name: str
    folder: Path
    pipes: Contestant
    process: subprocess.Popen[bytes]
    seconds: list[float] = field(default_factory=list)
    idle: int = 0
    stopped: bool = False
    peak_gb: float = 0.0

    def wait(self, limit: float | None = None) -> None:
        """Until its step is over; TimeoutError after `limit` seconds."""
        if not self.pipes.is_ready(limit):
            log = (self.folder / "log").read_text(errors="replace")[-3000:]
            raise SystemExit(f"{self.name} ended with code {self.process.wait()}:\n{log}")

    def step(self, limit: float | None) -> None:
        """One step, timed. One that takes longer than `limit` is the last, and counts as that."""
        if self.stopped:
            return
        began = time.perf_counter()
        self.pipes.go()
        try:
            self.wait(limit)
        except TimeoutError:
            self.note_peak()
            self.process.kill()
            self.stopped = True
        self.seconds.append(time.perf_counter() - began)

    def mark_idle(self) -> None:
        """What it holds now is not its steps'."""
        self.idle = self._memory("VmRSS")
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")  # resets VmHWM

    def note_peak(self) -> None:
        """Largest resident set since, above what it held then."""
        if not self.stopped:
            self.peak_gb = (self._memory("VmHWM") - self.idle) / 1e9

    def _memory(self, name: str) -> int:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def model_folder(options: argparse.Namespace) -> Path:
    """SmolLM2, made once for all."""
    return obtain(ModelSection(), options.home.resolve() / "models").path


def ours(folder: Path, options: argparse.Namespace, engine: str) -> list[str]:
    """Our command for a run of one RL stage, whose engine takes turns."""
    info = folder / "site" / "step_bench-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: step_bench\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[posttrain.plugins]\nstep = step_bench_engines\n")
    (folder / "site" / "step_bench_engines.py").write_text(PLUGINS)
    stage = {
        "kind": "rl",
        "inputs": {"model": "base"},
        "algorithm": "grpo",
        "steps": options.rounds + 1,
        "prompts_per_step": options.prompts,
        "num_generations": options.generations,
        "micro_batch_size": options.our_micro or options.micro,
        "generation": {"max_response_length": options.tokens},
        "kl": {"controller": {"name": "fixed", "coef": 0.0}},
        "skip_idle_rows": False,  # most rows of a model that knows nothing teach nothing
        "evaluate_every": 0,
        "checkpoint_every": 0,
        "optimizer": {"learning_rate": 1e-6},
    }
    config = {
        "name": "step",
        "engine": f"{engine}_in_turn",
        "model": {
            "source": str(model_folder(options)),
            "dtype": options.dtype,
            "attention": options.attention,
            "compile": options.compile,
            "max_model_len": 512,
        },
        "task": {"name": "arithmetic", "question": QUESTION},
        "limits": {"num_threads": options.threads},
        "stages": {"rl": stage},
    }
    path = write_config(folder / "run.yaml", config)
    return [*COMMAND, "run", str(path), "--home", str(prepared(folder / "home")), "--json"]


def theirs(folder: Path, options: argparse.Namespace, setting: str) -> list[str]:
    """TRL's process."""
    task = PluginManager().build(Task, "arithmetic", {"question": QUESTION})
    problems = task.problems("train", options.prompts * (options.rounds + 2), seed=0)
    reported = {
        **{name: getattr(options, name) for name in ("prompts", "generations", "tokens", "micro")},
        "dtype": options.dtype,
        "autocast": options.autocast,
        "threads": options.threads,
        "fast": setting in FAST,
        "steps": options.rounds + 1,
        "model": str(model_folder(options)),
        "out": str(folder / "out"),
        "times": str(folder / "times.json"),
        "problems": [
            {"prompt": [{"role": "user", "content": p.prompt}], "answer": p.answer}
            for p in problems
        ],
    }
    return [sys.executable, str(REPO / "tests" / "bench" / "step_trl.py"), json.dumps(reported)]


def begin(name: str, folder: Path, options: argparse.Namespace) -> Side:
    """Start a contestant, and wait until it is about to take its first step."""
    folder.mkdir()
    side, setting = name.split("-")
    command = (ours if side == "ours" else theirs)(folder, options, setting)
    pipes = Contestant(folder / "pipes")
    paths = [str(folder / "site"), str(REPO)] if side == "ours" else [str(options.trl)]
    env = os.environ | {
        ENVIRONMENT: str(pipes.folder),
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": str(options.threads),
        "HF_HUB_OFFLINE": "1",
    }
    env.pop("LD_PRELOAD", None)  # our command takes tcmalloc by itself, TRL's defaults do not
    if setting in FAST:
        env |= {"MALLOC_MMAP_THRESHOLD_": str(2**35), "MALLOC_TRIM_THRESHOLD_": str(2**35)}
    if setting == "fastest":
        env |= preloaded(env)
    with (folder / "log").open("wb") as log, (folder / "stdout").open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=log, env=env)
    found = Side(name, folder, pipes, process)
    threading.Thread(target=unblock, args=(found,), daemon=True).start()
    pipes.connect()
    found.wait()
    found.mark_idle()
    return found


def unblock(side: Side) -> None:
    """A process that ends before it opens its pipes would be waited for without end."""
    side.process.wait()
    for name, mode in (("ready", os.O_WRONLY), ("go", os.O_RDONLY)):
        try:
            os.close(os.open(side.pipes.folder / name, mode | os.O_NONBLOCK))
        except OSError:
            continue  # nobody waits at this end


def phases_of(side: Side) -> dict[str, float]:
    """Median seconds of each phase, the first step left out; the contestant has ended."""
    steps = side.seconds[1:]
    if side.stopped:
        return {}
    if side.name.startswith("trl"):
        rollout = json.loads((side.folder / "times.json").read_text())["rollout"]
        sampled = statistics.median(rollout[1 : len(steps) + 1])
        return {
            "rollout": round(sampled, 2),
            "update": round(statistics.median(steps) - sampled, 2),
        }
    result = json.loads((side.folder / "stdout").read_text().strip().splitlines()[-1])
    learned = Learned(result)
    found = {
        name: statistics.median(learned.history("rl", f"time/{name}_s")[1:] or [0.0])
        for name in PHASES
    }
    found["rollout and the rest"] = statistics.median(steps) - sum(found.values())
    return {name: round(value, 2) for name, value in found.items()}


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Rounds over all contestants, each taking a step in turn."""
    sides = [begin(name, folder / name, options) for name in options.who]
    for _ in range(options.rounds):
        for side in sides:
            side.step(options.limit)
    for side in sides:  # the last step, after which each says its times
        side.note_peak()
        if side.stopped:
            side.seconds += side.seconds[-1:] * (options.rounds - len(side.seconds))
            continue
        side.pipes.go()
        if side.process.wait(timeout=1800):
            raise SystemExit((side.folder / "log").read_text(errors="replace")[-3000:])
    best = {side.name: min(side.seconds[1:]) for side in sides}
    base = sides[-1]
    return {
        "benchmark": "step",
        "seconds": {name: round(value, 2) for name, value in best.items()},
        "all_seconds": {side.name: [round(s, 2) for s in side.seconds] for side in sides},
        f"times_{base.name}": {
            side.name: round(
                statistics.median(
                    b / s for b, s in zip(base.seconds[1:], side.seconds[1:], strict=True)
                ),
                2,
            )
            for side in sides
        },
        "at_least": [side.name for side in sides if side.stopped],
        "peak_gb": {side.name: round(side.peak_gb, 2) for side in sides},
        "phases": {side.name: phases_of(side) for side in sides},
        "shape": f"{options.prompts} prompts x {options.generations} x {options.tokens} tokens",
        "dtype": options.dtype,
        "autocast": options.autocast,
        "attention": options.attention,
        "compile": options.compile,
        "micro_batch": {"ours": options.our_micro or options.micro, "trl": options.micro},
        "threads": options.threads,
        "tcmalloc": find_allocator() is not None,
        "load": round(os.getloadavg()[0], 2),
        "versions": {
            "torch": version("torch"),
            "transformers": version("transformers"),
            "vllm": vllm_version(),
            "trl": next(options.trl.glob("trl-*.dist-info")).name.split("-")[1].rsplit(".", 1)[0],
        },
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one line, for machines")
    parser.add_argument("--trl", type=Path, required=True, help="the folder that TRL is in")
    parser.add_argument(
        "--who",
        nargs="*",
        choices=CONTESTANTS,
        default=list(CONTESTANTS[:3]),
        help="the last one is what the others are compared with",
    )
    parser.add_argument("--rounds", type=int, default=4, help="two or more; the first warms up")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--micro", type=int, default=32, help="rows of a micro-batch")
    parser.add_argument("--our-micro", type=int, default=0, help="ours; 0: as many as TRL's")
    parser.add_argument("--compile", action="store_true", help="ours: model.compile: true")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument(
        "--autocast",
        action="store_true",
        help="with --dtype float32: TRL as documented in bfloat16 all the same, its default",
    )
    parser.add_argument(
        "--limit", type=float, help="seconds; a step that takes longer is its contestant's last"
    )
    parser.add_argument("--attention", choices=["auto", "stream", "eager"], default="auto")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--home", type=Path, default=Path(".posttrain"))
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds is at least 2: the first one warms up")
    if not (options.trl / "trl").is_dir():
        parser.error(f"no folder 'trl' in {options.trl}: see the command in --help")
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), options)
    print(json.dumps(found) if options.json else json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
