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
from transformers import AutoModel, LlamaConfig

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
    """Two layers in the run's precision."""

    def __init__(self, runtime: ModelRuntime) -> None:
        hidden, width, rows = CPU_SIZES if runtime.device.type == "cpu" else GPU_SIZES
        config = LlamaConfig(
            hidden_size=hidden,
            intermediate_size=width,
            num_hidden_layers=LAYERS,
            num_attention_heads=hidden // 64,
            vocab_size=256,
        )
        with torch.device(runtime.device):
            self.model: Any = AutoModel.from_config(  # type: ignore[no-untyped-call]
                config,
                dtype=runtime.dtype,
                attn_implementation=runtime.plain_attention,
                trust_remote_code=False,
            )
            self.source, self.target = torch.ones(2, COPIED_BYTES // 4)
            self.ids = torch.ones(rows, SEQUENCE, dtype=torch.int64)
        widen(self.model)
        weights = sum(parameter.numel() for parameter in self.model.layers.parameters())
        self.layer_bytes = weights * runtime.dtype.itemsize / LAYERS
        self.flops = 2 * weights * self.ids.numel()

    def copy(self) -> None:
        self.target.copy_(self.source)

    @torch.no_grad()
    def one_token(self) -> None:
        self.model(input_ids=self.ids[:1, :1], use_cache=False)

    @torch.no_grad()
    def forward(self) -> None:
        self.model(input_ids=self.ids, use_cache=False)

    def train(self) -> None:
        states = self.model(input_ids=self.ids, use_cache=False).last_hidden_state
        states.float().sum().backward()
        self.model.zero_grad()


def measure(runtime: ModelRuntime, clock: Callable[[], float] = time.perf_counter) -> Rates:
    """The rates of this machine in the run's precision, in at most `BUDGET_S` of wall time.

    On a CPU one thread is timed in processor time, which other processes hardly change, and all
    threads by the clock. If all are slower than one, other processes are in the way, and
    `THREAD_SHARE` is assumed. What there was no time for is from the table.
    """
    began, on_cpu, threads = clock(), runtime.device.type == "cpu", torch.get_num_threads()
    known = Rates.of_device("cpu" if on_cpu else "h100", bfloat16=runtime.dtype == torch.bfloat16)
    probe, one = _Probe(runtime), 1 if on_cpu else threads
    works = [(work, one) for work in (probe.copy, probe.one_token, probe.forward, probe.train)]
    works += [(probe.forward, threads), (probe.copy, threads)]
    fastest = dict.fromkeys(works, math.inf)
    try:
        for work, used in MICRO_STEPS * works:
            if clock() - began > BUDGET_S / 2:  # so that the last one has the other half
                break
            torch.set_num_threads(used)
            timer = time.thread_time if on_cpu and used == 1 else clock
            started = timer()
            work()
            if not on_cpu:
                torch.cuda.synchronize(runtime.device)
            fastest[work, used] = min(fastest[work, used], timer() - started)
    finally:
        torch.set_num_threads(threads)
    copy_s, one_s, forward_s, train_s = (fastest[work] for work in works[:4])
    together, speedup = fastest[probe.forward, threads], THREAD_SHARE * threads
    if together <= forward_s < math.inf:
        speedup = forward_s / together
    copy_s = min(copy_s, fastest[probe.copy, threads])
    bytes_s, layer_s = 2 * COPIED_BYTES / copy_s or known.bytes_s, known.layer_s
    if one_s < math.inf:
        layer_s = max(0.0, one_s / LAYERS - probe.layer_bytes / bytes_s)
    products = max(forward_s - LAYERS * layer_s, forward_s / 2)
    forward = speedup * probe.flops / products or known.forward_flops
    products = max(train_s - 3 * LAYERS * layer_s, train_s / 2)
    train = speedup * 3 * probe.flops / products or forward
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    if not on_cpu:
        memory = float(torch.cuda.get_device_properties(runtime.device).total_memory)
    measured = {
        "seconds": round(clock() - began, 3),
        "training_gflops": round(train / 1e9, 3),
        "forward_gflops": round(forward / 1e9, 3),
        "memory_gb_per_s": round(bytes_s / 1e9, 3),
        "layer_ms": round(1e3 * layer_s, 3),
    }
    basis = f"micro-steps of a probe of {LAYERS} layers on this machine"
    return Rates(basis, train, forward, bytes_s, layer_s, memory, not on_cpu, measured)
