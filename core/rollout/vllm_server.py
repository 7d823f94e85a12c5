"""A vLLM server: its command line, the checks of given ones, and requests to it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from posttrain.core.cluster.servers import Json, Unreachable
from posttrain.core.contracts import EngineSetup
from posttrain.core.errors import ResourceError, RunError
from posttrain.core.rollout.replicas import Replica
from posttrain.core.rollout.sampling import ENTROPY_TOKENS, top_entropy
from posttrain.core.types import Completion, FinishReason, SamplingParams

MODEL_NAME = "policy"
WORKER = "posttrain.core.rollout.vllm_model.VllmWorker"
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


def server_arguments(
    setup: EngineSetup, options: ServerOptions, tensor_parallel: int = 1
) -> list[str]:
    """Those of Python, without the address to listen on."""
    on_cpu = setup.device.type == "cpu"
    eager = on_cpu if options.enforce_eager is None else options.enforce_eager
    cache_gb = options.kv_cache_gb or (1.0 if on_cpu else None)
    command = [
        *("-c", ENTRY),
        *("--model", str(setup.model_dir), "--served-model-name", MODEL_NAME),
        *("--dtype", dtype_name(setup.dtype), "--max-model-len", str(setup.max_model_len)),
        *("--max-num-seqs", str(options.max_num_seqs), "--seed", str(setup.seed)),
        *("--gpu-memory-utilization", str(options.gpu_memory_utilization)),
        *("--generation-config", "vllm"),  # not the model directory's own sampling defaults
        *("--logprobs-mode", "processed_logprobs", "--worker-extension-cls", WORKER),
        *("--disable-uvicorn-access-log", "--disable-log-stats"),
    ]
    if tensor_parallel > 1:
        command += ["--tensor-parallel-size", str(tensor_parallel)]
        command += ["--distributed-executor-backend", "mp"]  # not Ray, whose actor starts it
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


def server_variables(setup: EngineSetup, options: ServerOptions) -> dict[str, str]:
    """What a server needs in its environment; no secret is among it."""
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
    return env


ADVICE = "start it as docs/engines.md says"
# What two configurations of one architecture have in common.
ARCHITECTURE = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)


async def get_json(replica: Replica, path: str) -> Json:
    """The JSON object at `path`. Raises `ResourceError` when there is none."""
    try:
        reply = await replica.server.ask(path)
        found = json.loads(reply.text) if reply.status == 200 else None
        reason = f"it answered {reply.status}"
    except (Unreachable, json.JSONDecodeError) as error:
        found, reason = None, str(error)
    if not isinstance(found, dict):
        raise ResourceError(
            f"{replica.name}{path} could not be read ({reason}): is it a vLLM server with "
            f"VLLM_SERVER_DEV_MODE=1? {ADVICE}"
        )
    return found


async def check_given_servers(replicas: Sequence[Replica], setup: EngineSetup, lora: bool) -> None:
    """Raise `ResourceError` for a server whose samples or weights would not be what a run needs."""
    for replica in replicas:
        info = await get_json(replica, "/server_info?config_format=json")
        problems = list(_problems(info["vllm_config"], setup, lora))
        if problems:
            raise ResourceError(f"vLLM server {replica.name}: {'; '.join(problems)}: {ADVICE}")


def _problems(config: Json, setup: EngineSetup, lora: bool) -> list[str]:
    model = config["model_config"]
    found = [
        ("worker_extension_cls", config["parallel_config"]["worker_extension_cls"], WORKER),
        ("logprobs_mode", model["logprobs_mode"], "processed_logprobs"),
        ("generation_config", model["generation_config"], "vllm"),
        ("dtype", str(model["dtype"]).removeprefix("torch."), dtype_name(setup.dtype)),
    ]
    problems = [f"{name} is '{is_}', expected '{want}'" for name, is_, want in found if is_ != want]
    if model["max_model_len"] < setup.max_model_len:
        problems.append(
            f"max_model_len is {model['max_model_len']}, expected {setup.max_model_len} or more"
        )
    if lora and not (config.get("lora_config") or {}).get("target_modules"):
        problems.append("expected --enable-lora with --lora-target-modules for adapters")
    return problems


def check_architecture(replica: Replica, served: Json, setup: EngineSetup) -> None:
    """Raise `ResourceError` when the server's model is of another architecture than the run's."""
    own = json.loads((setup.model_dir / "config.json").read_text("utf-8"))
    other = [
        f"{name} is {served.get(name)!r}, expected {own[name]!r}"
        for name in ARCHITECTURE
        if own.get(name) is not None and served.get(name) != own[name]
    ]
    if other:
        raise ResourceError(
            f"vLLM server {replica.name} serves another model: {'; '.join(other)}: {ADVICE}"
        )


PATH = "/v1/completions"


def sampling_request(
    model: str,
    prompt: Sequence[int],
    params: SamplingParams,
    seed: int,
    max_tokens: int,
    stop_token_ids: Sequence[int],
) -> Json:
    request: Json = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "seed": seed,
        "stop_token_ids": list(stop_token_ids),
        "ignore_eos": True,  # only `stop_token_ids` end a response
        "logprobs": ENTROPY_TOKENS if params.entropy else 0,  # 0: of the sampled token alone
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    if params.stop_strings:
        request |= {"stop": list(params.stop_strings), "include_stop_str_in_output": True}
    return request


def read_completion(
    answer: Json,
    params: SamplingParams,
    stop_token_ids: Sequence[int],
    origin: Mapping[str, Any],  # Any: the fields of `Completion` that the engine knows
) -> Completion:
    try:
        choice = answer["choices"][0]
        ids = tuple(map(int, choice["token_ids"]))
        logprobs = tuple(map(float, choice["logprobs"]["token_logprobs"]))
        reason = _finish_reason(choice["finish_reason"], ids, stop_token_ids)
        entropies: tuple[float, ...] = ()
        if params.entropy:
            rows = choice["logprobs"]["top_logprobs"]
            entropies = tuple(top_entropy([*row.values()], params.temperature) for row in rows)
        if not ids or len(ids) != len(logprobs):
            raise ValueError(f"{len(ids)} tokens with {len(logprobs)} log-probs")
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise RunError(
            f"a vLLM server's answer is not a completion with token ids and log-probs ({error}): "
            "use "
            "a server of the version that docs/engines.md names"
        ) from error
    return Completion(
        token_ids=ids, logprobs=logprobs, finish_reason=reason, entropies=entropies, **origin
    )


def _finish_reason(said: str, ids: Sequence[int], stop_token_ids: Sequence[int]) -> FinishReason:
    if said not in ("length", "stop"):
        raise ValueError(f"finish reason '{said}'")
    if ids[-1] in stop_token_ids:  # also where it is the last token allowed
        return "stop"
    return "length" if said == "length" else "stop_string"


def scoring_request(model: str, ids: Sequence[int]) -> Json:
    return {
        "model": model,
        "prompt": list(ids),
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": 0,
    }


def read_scores(answer: Json, ids: Sequence[int]) -> list[float]:
    try:
        entries = answer["choices"][0]["prompt_logprobs"]
        pairs = zip(ids[1:], entries[1:], strict=True)
        return [float(entry[str(token)]["logprob"]) for token, entry in pairs]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise RunError(
            f"a vLLM server did not give the log-probs of the tokens it was sent ({error}): use a "
            "server of the version that docs/engines.md names"
        ) from error
