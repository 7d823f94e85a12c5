"""How an update's cost grows with tokens, group, vocabulary, model and ranks; one JSON line.

Random models of Llama's shape, one axis varied at a time around a common middle. For each setting
the seconds of one update, those of the least setting times the growth of useful FLOPs, and the
ratio: 1 is a cost that grows as the work does. Ranks share the cores: N of them have 1 / N each.

    python tests/bench/scaling.py [--json] [--picture scaling.png] [--dtype float32]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

REPO = Path(__file__).resolve().parents[2]
if str(REPO) not in sys.path:
    sys.path.append(str(REPO))

from posttrain.core.cluster.processes import RankProcesses  # noqa: E402
from posttrain.core.models.device import ModelRuntime  # noqa: E402
from posttrain.core.runtime.heap import keep_freed_memory  # noqa: E402
from tests.bench.learner import (  # noqa: E402
    gemm_rate,
    make_batch,
    make_learner,
    seconds_of,
    update,
    useful_flops,
)


@dataclass(frozen=True)
class Setting:
    """What is varied. The other sizes of the model follow `hidden`."""

    tokens: int = 32
    generations: int = 8
    vocabulary: int = 16_384
    hidden: int = 256
    ranks: int = 1


AXES: dict[str, tuple[int, ...]] = {
    "tokens": (16, 32, 64, 128),
    "generations": (2, 4, 8, 16),
    "vocabulary": (4_096, 16_384, 65_536),
    "hidden": (128, 256, 512),
    "ranks": (1, 2),
}


def make_model(folder: Path, setting: Setting) -> Path:
    """A random model of eight layers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=setting.vocabulary,
        hidden_size=setting.hidden,
        intermediate_size=3 * setting.hidden,
        num_hidden_layers=8,
        num_attention_heads=setting.hidden // 64,
        num_key_value_heads=max(1, setting.hidden // 128),
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def seconds(folder: Path, setting: Setting, options: argparse.Namespace) -> tuple[float, float]:
    """Seconds of an update, the best of a few, and its useful FLOPs."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    runtime = ModelRuntime(device, getattr(torch, options.dtype), "eager")
    shape = argparse.Namespace(
        prompts=options.prompts,
        prompt_tokens=40,
        same_tokens=0,
        generations=setting.generations,
        tokens=setting.tokens,
        ragged=False,
        attention="eager",
        compile=False,
    )
    learner = make_learner(make_model(folder, setting), runtime, 32)
    batch = make_batch(shape, setting.vocabulary)
    with ExitStack() as opened:
        if setting.ranks == 1:
            work = partial(update, options.way, learner, batch, shape)
        else:
            threads = max(1, torch.get_num_threads() // setting.ranks)
            env = {"OMP_NUM_THREADS": str(threads)}
            ranks = RankProcesses(setting.ranks, "tests.bench.scaling_rank", env)
            opened.callback(ranks.close)
            ranks.start((folder, options.dtype), _nothing)
            work = partial(ranks.call, "update", batch, check=_nothing)
        times = [seconds_of(work, device) for _ in range(options.rounds + 1)]
    return min(times[1:]), useful_flops(batch, learner.model)  # the first one warms up


def _nothing() -> None:
    """Nobody stops a benchmark."""


def measure(options: argparse.Namespace) -> dict[str, object]:
    """Every axis in turn."""
    keep_freed_memory()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: dict[str, list[dict[str, float]]] = {}
    rate = gemm_rate(getattr(torch, options.dtype), device, 2048)
    for axis in options.axes:
        rows = []
        for number, value in enumerate(AXES[axis]):
            with tempfile.TemporaryDirectory() as folder:
                took, flops = seconds(Path(folder), replace(Setting(), **{axis: value}), options)
            if number == 0:
                first = took / flops
            rows.append(
                {
                    axis: value,
                    "seconds": round(took, 3),
                    "times_work": round(took / (first * flops), 2),
                    "share_of_gemm": round(flops / took / rate, 3),
                }
            )
        found[axis] = rows
    return {
        "benchmark": "scaling",
        "middle": asdict(Setting()),
        "axes": found,
        "way": options.way,
        "dtype": options.dtype,
        "gemm_gflops": round(rate / 1e9),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "versions": {"torch": torch.__version__},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def draw(found: dict[str, object], path: Path) -> None:
    """One panel per axis: seconds, and what they would be if they grew as the work does."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    axes = found["axes"]
    assert isinstance(axes, dict)
    figure, panels = pyplot.subplots(
        1, len(axes), figsize=(2.6 * len(axes), 2.8), squeeze=False, sharey=True
    )
    for panel, (axis, rows) in zip(panels[0], axes.items(), strict=True):
        values = [row[axis] for row in rows]
        panel.loglog(values, [row["seconds"] for row in rows], marker="o", label="measured")
        panel.loglog(
            values,
            [row["seconds"] / row["times_work"] for row in rows],
            linestyle=":",
            color="grey",
            label="as the work grows",
        )
        panel.set_xlabel(axis)
        panel.set_xticks(values, [str(value) for value in values])
        panel.minorticks_off()
    ticks = (0.25, 0.5, 1, 2, 5, 10, 20)
    low, high = panels[0][0].get_ylim()
    shown = [tick for tick in ticks if low <= tick <= high]
    panels[0][0].set_yticks(shown, [f"{tick:g}" for tick in shown])
    panels[0][0].set_ylabel("seconds")
    panels[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one line, for machines")
    parser.add_argument("--axes", nargs="*", choices=sorted(AXES), default=list(AXES))
    parser.add_argument("--way", choices=["shared", "stream"], default="stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="float32")
    parser.add_argument("--picture", type=Path, help="draw the curves into this file")
    options = parser.parse_args()
    found = measure(options)
    if options.picture:
        draw(found, options.picture)
    print(json.dumps(found) if options.json else json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
