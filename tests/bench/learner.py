"""One policy update in several ways, in turn: tokens/s, share of the GEMM rate, peak memory.

plain    each row its own padded sequence, all logits at once, autograd: what a first script does
chunked  the same rows, logits for response tokens only and in chunks
shared   each prompt once, responses padded (model.attention: eager)
stream   each token once that follows the same tokens, nothing padded: the default
compiled the same with every decoder layer under torch.compile; only with --compile

Useful FLOPs: 6 x the weights of the layers for each token that is needed (a prompt once a group,
what all prompts begin with once, a response without its last token) and 6 x those of the head for
each response token; no attention, no recomputation. Prints one JSON line.

    python tests/bench/learner.py [--json] [--dtype float32] [--prompts 8 --generations 8]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from posttrain.core.runtime.startup import bound_waiting

bound_waiting()  # as in a run, before torch is loaded

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import PreTrainedModel  # noqa: E402

from posttrain.core.batch import RolloutBatch  # noqa: E402
from posttrain.core.config.sections import ModelSection, OptimizerSection  # noqa: E402
from posttrain.core.contracts import Aggregator, PolicyLoss  # noqa: E402
from posttrain.core.data.tokens import response_batch  # noqa: E402
from posttrain.core.models.device import ModelRuntime  # noqa: E402
from posttrain.core.models.layers import compile_layers  # noqa: E402
from posttrain.core.models.linear import is_emulated  # noqa: E402
from posttrain.core.models.loading import load_policy  # noqa: E402
from posttrain.core.models.source import obtain  # noqa: E402
from posttrain.core.models.stream_attention import use_stream_attention  # noqa: E402
from posttrain.core.plugin_manager import PluginManager  # noqa: E402
from posttrain.core.runtime.heap import keep_freed_memory, trim_heap  # noqa: E402
from posttrain.core.training.forward import check_passes  # noqa: E402
from posttrain.core.training.learner import Learner  # noqa: E402
from posttrain.core.training.objective import LossTerm, Objective  # noqa: E402
from posttrain.core.training.optim import MasterOptimizer  # noqa: E402
from posttrain.core.training.ranks import ALONE, Ranks  # noqa: E402
from posttrain.core.training.stream import stream_of  # noqa: E402
from posttrain.core.training.updates import UpdateSettings  # noqa: E402

WAYS = ("plain", "chunked", "shared", "stream")


def make_batch(options: argparse.Namespace, vocabulary: int) -> RolloutBatch:
    """Groups with random tokens; responses of `tokens` down to a quarter of it, as they end."""
    numbers = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(100, vocabulary, (count,), generator=numbers).tolist()

    least = max(1, options.tokens // 4) if options.ragged else options.tokens
    prompts, responses, groups = [], [], []
    start = tokens(options.same_tokens)
    for group in range(options.prompts):
        prompt = start + tokens(options.prompt_tokens - len(start))
        for _ in range(options.generations):
            length = int(torch.randint(least, options.tokens + 1, (1,), generator=numbers))
            prompts.append(prompt)
            responses.append(tokens(length))
            groups.append(group)
    batch = response_batch(
        prompts=prompts,
        responses=responses,
        group_ids=groups,
        pad_token_id=0,
        problems=(),
        response_logprobs=[[-1.0] * len(r) for r in responses],
    )
    advantages = torch.randn((len(batch), 1), generator=numbers).expand(batch.mask.shape)
    return batch.with_columns(advantages=advantages.contiguous())


def useful_flops(batch: RolloutBatch, model: Any) -> float:
    """What the module docstring counts."""
    head = model.get_output_embeddings().weight.numel()
    layers = sum(p.numel() for p in model.model.layers.parameters())
    needed = len(stream_of(batch, include_last=False).kept)
    flops: float = 6.0 * (layers * needed + head * int(batch.response_mask.sum()))
    return flops


def plain_update(learner: Learner, batch: RolloutBatch, size: int) -> None:
    """REINFORCE with GRPO's advantages on padded sequences: the learner's gradient on-policy."""
    model, device, count = learner.model, learner.model.device, batch.mask.sum().to("cpu")
    for rows in torch.split(torch.arange(len(batch)), size):
        micro = batch.select(rows)
        ids = torch.cat([micro.prompt_ids, micro.response_ids], dim=1).to(device)
        mask = torch.cat([micro.prompt_mask, micro.response_mask], dim=1).to(device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
        start, targets = micro.prompt_ids.shape[1], micro.response_ids.to(device)
        logp = torch.log_softmax(logits[:, start - 1 : -1].float(), dim=-1)
        chosen = logp.gather(2, targets[..., None]).squeeze(2)
        weights = (micro.column("advantages") * micro.mask / count).to(device)
        loss = -(torch.exp(chosen - chosen.detach()) * weights).sum()
        loss.backward()  # type: ignore[no-untyped-call]
    learner.optimizer.step()


def gemm_rate(dtype: torch.dtype, device: torch.device, size: int) -> float:
    """FLOP/s of a square product, the best of a few.

    Where bfloat16's are made in float32 (`wide_products`), float32's, without the casts.
    """
    if is_emulated(dtype, device):
        dtype = torch.float32
    left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(5):
        best = min(best, seconds_of(lambda: left @ right, device))
    return 2.0 * size**3 / best


def seconds_of(work: Any, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


class PeakMemory:
    """Largest memory above that at the start, GB: the device's, or this process's resident set."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self._start = torch.cuda.memory_allocated()
            return
        trim_heap()
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        self._start = self._read("VmRSS")

    def result(self) -> float:
        if self._device.type == "cuda":
            return (torch.cuda.max_memory_allocated() - self._start) / 1e9
        return (self._read("VmHWM") - self._start) / 1e9

    @staticmethod
    def _read(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def make_learner(
    folder: Path,
    runtime: ModelRuntime,
    size: int,
    ranks: Ranks = ALONE,
    place: Callable[[PreTrainedModel], None] = lambda model: None,
) -> Learner:
    """GRPO's loss on the model in `folder`, one update per batch; `place` spreads it over ranks."""
    manager = PluginManager()
    mean = manager.build(Aggregator, "token-mean")
    term = LossTerm(manager.build(PolicyLoss, "ppo_clip", {}), mean, 1.0)
    model = load_policy(folder, runtime)
    check_passes(model)  # before ranks are in the way
    place(model)
    optimizer = MasterOptimizer(model, OptimizerSection(learning_rate=1e-6), 1000)
    settings = UpdateSettings(1, 1, size, 1.0, 0)
    return Learner(model, optimizer, Objective((term,), mean), settings, ranks=ranks)


def update(way: str, learner: Learner, batch: RolloutBatch, options: argparse.Namespace) -> None:
    """One update of `batch`, one of `WAYS`."""
    if way in ("stream", "compiled"):
        use_stream_attention(learner.model)
    else:
        learner.model.set_attn_implementation(options.attention)
    if way == "chunked":
        batch = replace(batch, group_id=torch.arange(len(batch)))
    # One model serves all ways: its compiled layers run as they are in the others.
    stance = "force_eager" if options.compile and way != "compiled" else "default"
    with torch.compiler.set_stance(stance):
        if way == "plain":
            plain_update(learner, batch, options.plain_micro)
        else:
            learner.update(batch, 0, 0.0)


def measure(options: argparse.Namespace) -> dict[str, object]:
    """Rounds over all ways; medians of the rounds' times and of their ratios."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, options.dtype)
    keep_freed_memory()
    runtime = ModelRuntime(device, dtype, options.attention)
    folder = options.model or obtain(ModelSection(), options.home / "models").path
    learner = make_learner(folder, runtime, options.micro)
    batch = make_batch(options, learner.model.config.vocab_size)
    if options.compile:
        options.ways = [*options.ways, "compiled"]
        compile_layers(learner.model)
    times: dict[str, list[float]] = {way: [] for way in options.ways}
    first: dict[str, float] = {}
    peaks: dict[str, float] = {}
    rates = []
    for number in range(options.rounds + 2):
        rates.append(gemm_rate(dtype, device, 4096 if device.type == "cuda" else 2048))
        for way in options.ways:
            peak = PeakMemory(device) if number == 1 else None
            took = seconds_of(lambda way=way: update(way, learner, batch, options), device)
            first.setdefault(way, took)
            if peak is not None:  # with the heap trimmed before it, so not for the clock
                peaks[way] = peak.result()
            elif number:  # the first round warms up
                times[way].append(took)
    flops, rate = useful_flops(batch, learner.model), max(rates)
    best = {way: min(values) for way, values in times.items()}
    tokens = int(batch.mask.sum())
    plain = times.get("plain")
    return {
        "benchmark": "learner",
        "first_seconds": {way: round(value, 1) for way, value in first.items()},
        "seconds": {way: round(value, 3) for way, value in best.items()},
        "response_tokens_per_s": {way: round(tokens / value) for way, value in best.items()},
        "share_of_gemm": {way: round(flops / value / rate, 3) for way, value in best.items()},
        "times_plain": {
            way: round(statistics.median(p / v for p, v in zip(plain, values, strict=True)), 2)
            for way, values in times.items()
        }
        if plain
        else {},
        "peak_gb": {way: round(value, 2) for way, value in peaks.items()},
        "gemm_gflops": round(rate / 1e9),
        "useful_tflop": round(flops / 1e12, 3),
        "response_tokens": tokens,
        "same_tokens": options.same_tokens,
        "shape": f"{options.prompts} x {options.prompt_tokens} + {options.generations} x "
        f"{'up to ' if options.ragged else ''}{options.tokens}",
        "micro_batch": {"plain": options.plain_micro, "other": options.micro},
        "dtype": options.dtype,
        "model": folder.name,
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "machine": torch.cuda.get_device_name()
        if device.type == "cuda"
        else f"{platform.machine()}, {os.cpu_count()} cores",
    }


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one line, for machines")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--compile", action="store_true", help="the way 'compiled' as well")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=40)
    parser.add_argument(
        "--same-tokens", type=int, default=0, help="of these, as many are the same in all prompts"
    )
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--ragged", action="store_true", help="responses of different lengths")
    parser.add_argument("--micro", type=int, default=32)
    parser.add_argument("--plain-micro", type=int, default=32)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--attention", choices=["eager", "sdpa"], default="eager")
    parser.add_argument("--model", type=Path, default=None, help="default: the bundled SmolLM2")
    parser.add_argument("--home", type=Path, default=Path(".posttrain"))
    options = parser.parse_args()
    if options.compile and torch.cuda.is_available():  # uncompiled ways have compiled kernels there
        parser.error("on CUDA, tests/gpu/mfu.py with and without --compile compares these")
    print(json.dumps(measure(options), indent=None if options.json else 2))


if __name__ == "__main__":
    main()
