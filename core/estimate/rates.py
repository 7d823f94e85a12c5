"""How fast a machine is: measured here with a small fixed probe, or from a table of peak rates.

The probe is a Llama of two layers, the same for every model; models are extrapolated by their
FLOPs. A time is that of the fastest of a few micro-steps.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from posttrain.core.models.device import ModelRuntime
from posttrain.core.models.linear import widen

BUDGET_S, MICRO_STEPS = 5.0, 20
"""Wall time that measuring may take in all, and the most micro-steps of one kind."""
LAYERS, SEQUENCE, COPIED_BYTES = 2, 32, 2**26
CPU_SIZES, GPU_SIZES = (576, 1536, 8), (2048, 5632, 256)
"""Hidden and MLP width of the probe, and its rows; it holds some 0.3 GB, on a GPU 2 GB."""
UTILISATION, THREAD_SHARE = 0.4, 0.8
"""Assumed share of the table's rates that is reached, and speed-up per thread where other processes
keep it from being measured."""
LAYER_S = 3e-4
"""Assumed fixed time of one layer in one pass of eager PyTorch."""
PEAKS = {
    "h100": (989e12, 67e12, 3.35e12, 80e9),
    "h200": (989e12, 67e12, 4.8e12, 141e9),
    "a100": (312e12, 19.5e12, 2.04e12, 80e9),
    "cpu": (2e12, 1e12, 80e9, 32e9),
}
"""Peak FLOP/s in bfloat16 and in float32, bytes/s and bytes of memory, from NVIDIA's data sheets
(SXM, dense); `cpu` stands for 8 server cores with bfloat16 instructions."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates that are reached, and bytes of memory; `basis` says where they are from.

    `layer_s` is the fixed time of one layer in one pass. `measured` has the figures in common
    units; it is empty for a device of the table.
    """

    basis: str
    train_flops: float
    forward_flops: float
    bytes_s: float
    layer_s: float
    memory: float
    on_gpu: bool
    measured: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of_device(cls, name: str, *, bfloat16: bool) -> Rates:
        """Of a device in the table."""
        rounded, full, bandwidth, memory = PEAKS[name]
        flops = UTILISATION * (rounded if bfloat16 else full)
        basis = f"peak rates of one {name}, {UTILISATION:.0%} of which are assumed to be reached"
        return cls(basis, flops, flops, UTILISATION * bandwidth, LAYER_S, memory, name != "cpu")


class _Probe:
    """Two layers in the run's precision, and the clock that ends measuring."""

    def __init__(self, runtime: ModelRuntime, clock: Callable[[], float]) -> None:
        self.clock, self.began, self.device = clock, clock(), runtime.device
        hidden, width, rows = CPU_SIZES if runtime.device.type == "cpu" else GPU_SIZES
        config = LlamaConfig(
            hidden_size=hidden,
            intermediate_size=width,
            num_hidden_layers=LAYERS,
            num_attention_heads=hidden // 64,
            vocab_size=256,
        )
        with torch.device(runtime.device):
            self.model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config,
                dtype=runtime.dtype,
                attn_implementation=runtime.plain_attention,
                trust_remote_code=False,
            )
            self.source, self.target = torch.ones(2, COPIED_BYTES // 4)
            self.ids = torch.ones(rows, SEQUENCE, dtype=torch.int64)
        widen(self.model)
        weights = sum(p.numel() for p in self.model.base_model.layers.parameters())
        self.layer_bytes = weights * runtime.dtype.itemsize / LAYERS
        self.work = 2 * weights * self.ids.numel()

    def copy(self) -> None:
        self.target.copy_(self.source)

    @torch.no_grad()
    def one_token(self) -> None:
        self.model.base_model(input_ids=self.ids[:1, :1], use_cache=False)

    @torch.no_grad()
    def forward(self) -> None:
        self.model.base_model(input_ids=self.ids, use_cache=False)

    def train(self) -> None:
        states = self.model.base_model(input_ids=self.ids, use_cache=False).last_hidden_state
        states.float().sum().backward()
        self.model.zero_grad()

    def fastest(self, work: Callable[[], object], share: float, *, own: bool = False) -> float:
        """Seconds of the fastest micro-step before `share` of the budget is used; else infinity.

        `own`: processor time of this thread, which other processes hardly change.
        """
        timer = time.thread_time if own else self.clock
        best, last = math.inf, 0.0
        for _ in range(MICRO_STEPS):
            started = self.clock()
            if started - self.began + last >= share * BUDGET_S:
                break
            before = timer()
            work()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            best, last = min(best, timer() - before), self.clock() - started
        return best


def measure(runtime: ModelRuntime, clock: Callable[[], float] = time.perf_counter) -> Rates:
    """The rates of this machine in the run's precision, in at most `BUDGET_S` of wall time.

    On a CPU one thread is timed, then all of them. If all are slower than one, other processes are
    in the way, and `THREAD_SHARE` is assumed. What there was no time for is from the table.
    """
    on_cpu, threads, speedup = runtime.device.type == "cpu", torch.get_num_threads(), 1.0
    known = Rates.of_device("cpu" if on_cpu else "h100", bfloat16=runtime.dtype == torch.bfloat16)
    torch.set_num_threads(1 if on_cpu else threads)
    try:
        probe = _Probe(runtime, clock)
        copy_s = probe.fastest(probe.copy, 0.1, own=on_cpu)
        one_s = probe.fastest(probe.one_token, 0.15, own=on_cpu)
        forward_s = probe.fastest(probe.forward, 0.25, own=on_cpu)
        train_s = probe.fastest(probe.train, 0.38, own=on_cpu)
    finally:
        torch.set_num_threads(threads)
    if on_cpu and threads > 1:
        together = probe.fastest(probe.forward, 0.45)
        speedup = forward_s / together if together < forward_s else THREAD_SHARE * threads
        copy_s = min(copy_s, probe.fastest(probe.copy, 0.5))
    bytes_s = 2 * COPIED_BYTES / copy_s or known.bytes_s
    layer_s, forward, train = known.layer_s, known.forward_flops, known.train_flops
    if math.isfinite(one_s):
        layer_s = max(0.0, one_s / LAYERS - probe.layer_bytes / bytes_s)
    if math.isfinite(forward_s):
        products = max(forward_s - LAYERS * layer_s, forward_s / 2)
        forward = train = speedup * probe.work / products
    if math.isfinite(train_s):
        train = speedup * 3 * probe.work / max(train_s - 3 * LAYERS * layer_s, train_s / 2)
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    if not on_cpu:
        memory = float(torch.cuda.get_device_properties(runtime.device).total_memory)
    measured = {
        "seconds": round(clock() - probe.began, 3),
        "training_gflops": round(train / 1e9, 3),
        "forward_gflops": round(forward / 1e9, 3),
        "memory_gb_per_s": round(bytes_s / 1e9, 3),
        "layer_ms": round(1e3 * layer_s, 3),
    }
    basis = f"micro-steps of a probe of {LAYERS} layers on this machine"
    return Rates(basis, train, forward, bytes_s, layer_s, memory, not on_cpu, measured)
