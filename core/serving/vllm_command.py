"""The command line and environment of a vLLM server that fits a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from posttrain.core.contracts import EngineSetup

MODEL_NAME = "policy"
WORKER = "posttrain.core.serving.vllm_model.VllmWorker"
# As `python -m vllm.entrypoints.openai.api_server`, which the engine's process would import again.
ENTRY = "from vllm.entrypoints.launchers.api_server.entry import main; main()"
# Prompt tokens of one step on a CPU; more gains no speed there.
PREFILL_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What a user may set of each server; None = by device."""

    gpu_memory_utilization: float
    kv_cache_gb: float | None
    enforce_eager: bool | None
    max_num_seqs: int
    max_lora_rank: int | None
    lora_modules: Sequence[str]
    num_threads: int
    extra_args: Sequence[str]


def lora_rank_of_vllm(rank: int) -> int:
    """The smallest `max_lora_rank` that vLLM knows and that takes adapters of `rank`."""
    return next(known for known in (1, 8, 16, 32, 64, 128, 256, 320, 512) if known >= rank)


def dtype_name(dtype: torch.dtype) -> str:
    return "bfloat16" if dtype == torch.bfloat16 else "float32"


def server_command(setup: EngineSetup, options: ServerOptions, port: int) -> list[str]:
    on_cpu = setup.device.type == "cpu"
    eager = on_cpu if options.enforce_eager is None else options.enforce_eager
    cache_gb = options.kv_cache_gb or (1.0 if on_cpu else None)
    command = [
        *(sys.executable, "-c", ENTRY, "--host", "127.0.0.1", "--port", str(port)),
        *("--model", str(setup.model_dir), "--served-model-name", MODEL_NAME),
        *("--dtype", dtype_name(setup.dtype), "--max-model-len", str(setup.max_model_len)),
        *("--max-num-seqs", str(options.max_num_seqs), "--seed", str(setup.seed)),
        *("--gpu-memory-utilization", str(options.gpu_memory_utilization)),
        *("--generation-config", "vllm"),  # not the model directory's own sampling defaults
        *("--logprobs-mode", "processed_logprobs", "--worker-extension-cls", WORKER),
        *("--disable-uvicorn-access-log", "--disable-log-stats"),
    ]
    if cache_gb is not None:
        command += ["--kv-cache-memory-bytes", str(int(cache_gb * 2**30))]
    if eager:
        command.append("--enforce-eager")
    if options.max_lora_rank is not None:
        rank = lora_rank_of_vllm(options.max_lora_rank)
        command += ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", "1"]
        command += ["--lora-target-modules", *options.lora_modules]
    if on_cpu:
        # On a CPU, vLLM cannot rewind the generator of a seeded request whose prompt it split.
        batched = max(PREFILL_TOKENS, setup.max_model_len)
        command += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(batched)]
        command += ["--distributed-executor-backend", "uni"]
    return [*command, *options.extra_args]


def server_environment(
    setup: EngineSetup, options: ServerOptions, gpus: str | None
) -> dict[str, str]:
    """This process's environment, with what the server needs; no secret is added."""
    env = {
        "VLLM_SERVER_DEV_MODE": "1",  # `/collective_rpc` and `/reset_prefix_cache`; on loopback
        "VLLM_CONFIGURE_LOGGING": "1",  # the engine in process turns it off for itself
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if options.max_lora_rank is not None:
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
    if setup.device.type == "cpu":
        env |= {
            "OMP_NUM_THREADS": str(options.num_threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else all replicas take the same cores
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # lets the executor be `uni`: one process less
        }
    if gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = gpus
    return {**os.environ, **env}
