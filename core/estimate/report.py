"""The estimates of a run as figures by name, with what they are based on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.core.config.evaluation_stages import BenchmarkStage
from posttrain.core.config.schema import RunConfig
from posttrain.core.config.sections import OptimizerSection
from posttrain.core.estimate.estimate import GB, Estimator, Training
from posttrain.core.estimate.rates import Rates, measure
from posttrain.core.estimate.shape import find_model
from posttrain.core.estimate.tokens import Lengths, RunData
from posttrain.core.models.device import ModelRuntime
from posttrain.core.models.linear import packs
from posttrain.core.runtime.seeding import derive_seed


def estimate_run(
    data: RunData,
    cache: Path,
    names: Sequence[str],
    engine: str,
    engine_rows: int,
    device: str | None = None,
) -> dict[str, Any]:
    """The stages in `names`, which run in that order, on `device` of the table or this machine.

    If the model's size is not known there is only the key `model`, which says so.
    """
    config, known = data.config, find_model(data.config.model, cache)
    if known is None:
        reported = f"{config.model.source}: its size is not known here, so there are no estimates"
        return {"model": reported}
    model = f"{config.model.source}: {known.shape.total / 1e6:,.1f} M parameters ({known.how})"
    if not names:
        return {"model": model}
    if device is None:
        runtime = ModelRuntime.from_config(config.model)
        each, rates = runtime.dtype.itemsize, measure(runtime)
    else:
        rounded = ("bfloat16", "autocast") if device == "cpu" else ("auto", "bfloat16", "autocast")
        each = 2 if config.model.dtype in rounded else 4
        rates = Rates.of_device(device, bfloat16=each == 2)
    estimator = Estimator(
        data=data,
        lengths=Lengths.measured(data, known, derive_seed(config.seed, "plan") % 2**31),
        shape=known.shape,
        rates=rates,
        engine=engine,
        engine_rows=engine_rows,
        engine_bytes=_engine_bytes(config, engine, float(each * known.shape.total), rates),
        weight_bytes=4 if config.model.dtype == "autocast" else each,
        compute_bytes=each,
    )
    stages = estimator.stages(names)
    left = most = 0.0
    for row in stages.values():
        most, left = max(most, left + row["disk_peak_gb"]), left + row["disk_gb"]
    total = {
        "seconds": round(sum(row["seconds"] for row in stages.values()), 2),
        "memory_gb": max((row["memory_gb"] for row in stages.values()), default=0.0),
        "disk_gb": round(left, 4),
        "disk_peak_gb": round(most, 4),
    }
    unknown = [name for name in names if name not in stages]
    return {
        "model": model,
        "notes": [*_notes(estimator, unknown), *_advice(estimator, stages)],
        "calibration": dict(rates.measured),
        "total": total,
        "stages": stages,
    }


def _engine_bytes(config: RunConfig, engine: str, weights: float, rates: Rates) -> float:
    """What the rollout engine holds in this process, or on the GPU that it shares."""
    named = config.engine
    fields: dict[str, Any] = {} if isinstance(named, str) else named.fields()
    if engine == "vllm_server":
        return 0.0
    if engine == "vllm":
        share, cache = fields.get("gpu_memory_utilization") or 0.4, fields.get("kv_cache_gb")
        if rates.on_gpu and not cache:
            return max(weights, float(share) * rates.memory)
        return weights + float(cache or 1.0) * 2**30
    if rates.on_gpu or not rates.measured:
        return weights
    runtime, when = ModelRuntime.from_config(config.model), fields.get("packed_weights")
    packed = packs(int(weights), runtime.dtype, runtime.device, when or "auto")
    return weights * (2 if packed else 1)


def _notes(estimator: Estimator, unknown: Sequence[str]) -> list[str]:
    """What the estimates are based on, a sentence each, and which stages have none."""
    rates, config = estimator.rates, estimator.data.config
    found = [
        f"These are estimates, from {rates.basis}. Expect time within a factor of 2 and memory "
        "within 30 %.",
        f"Lengths: {estimator.lengths.how}. A model answers up to the limit, or after an sft stage "
        "as long as the worked answers.",
        "Not included: the start of the run, reward programs, judges and teachers behind servers, "
        "tools, groups that are sampled again; nor what is saved where rows are skipped or results "
        "are reused.",
    ]
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    if rates.measured and load > cores:
        found.append(
            f"This machine is busy (load {load:.1f} on {cores} cores): a run takes longer than "
            "estimated while it is."
        )
    if config.trains_elsewhere:
        found.append("All figures are of one process of this machine, not of the learner's ranks.")
    if unknown:
        found.append(f"Not estimated, and not in the totals: {', '.join(unknown)}.")
    if any(isinstance(config.stages[name], BenchmarkStage) for name in unknown):
        found.append(
            "How many prompts and tokens a suite of lm-eval or inspect-ai takes is known only once "
            "it runs."
        )
    return found


def _advice(estimator: Estimator, stages: dict[str, dict[str, Any]]) -> list[str]:
    """For each stage that does not fit into the device's memory, what to change."""
    room, found = estimator.rates.memory / GB, []
    for name, row in stages.items():
        stage, peak, tries = estimator.data.config.stages[name], row["memory_gb"], []
        if row["fits"]:
            continue
        if isinstance(stage, Training):
            if row["memory"]["training"] > peak / 10 and stage.micro_batch_size > 1:
                tries.append(f"stages.{name}.micro_batch_size={stage.micro_batch_size // 2}")
            if stage.lora is None:
                tries.append(f"stages.{name}.lora={{}}")
            used = stage.optimizer
            wide = isinstance(used, OptimizerSection) and used.moments == "float32"
            if wide and not stage.lora and estimator.rates.on_gpu:
                tries.append(f"stages.{name}.optimizer.moments=8bit")
        found.append(
            f"{name} does not fit: it needs about {peak:.3g} GB of {room:.3g} GB. Try "
            f"{', '.join(tries) or 'a smaller model, or fewer sequences at once'}."
        )
    return found
