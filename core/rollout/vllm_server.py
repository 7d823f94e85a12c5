"""What vLLM is started with and asked, in this process or as a server; checks of given servers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from posttrain.core.contracts import EngineSetup
from posttrain.core.errors import ResourceError, RunError
from posttrain.core.rollout.replicas import Replica
from posttrain.core.rollout.sampling import ENTROPY_TOKENS, top_entropy
from posttrain.core.runtime.http_client import Json, Unreachable
from posttrain.core.types import Completion, FinishReason, SamplingParams

MODEL_NAME = "policy"
WORKER = "posttrain.core.rollout.vllm_model.VllmWorker"
# As `python -m vllm.entrypoints.openai.api_server`, which the engine's process would import again.
ENTRY = "from vllm.entrypoints.launchers.api_server.entry import main; main()"
# Prompt tokens of one step on a CPU; more gains no speed there.
PREFILL_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What a user may set of vLLM; None = by device. The last two are of servers."""

    gpu_memory_utilization: float
    kv_cache_gb: float | None
    enforce_eager: bool | None
    max_num_seqs: int
    max_lora_rank: int | None
    lora_modules: Sequence[str]
    num_threads: int = 1
    extra_args: Sequence[str] = ()


def lora_rank_of_vllm(rank: int) -> int:
    """The smallest `max_lora_rank` that vLLM knows and that takes adapters of `rank`."""
    return next(known for known in (1, 8, 16, 32, 64, 128, 256, 320, 512) if known >= rank)


def dtype_name(dtype: torch.dtype) -> str:
    return "bfloat16" if dtype == torch.bfloat16 else "float32"


def engine_arguments(
    setup: EngineSetup, options: ServerOptions
) -> dict[str, Any]:  # Any: vLLM's arguments are of several types
    """What vLLM is started with in this process and as a server, by the names in Python."""
    on_cpu = setup.device.type == "cpu"
    found: dict[str, Any] = {
        "model": str(setup.model_dir),
        "dtype": dtype_name(setup.dtype),
        "max_model_len": setup.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "seed": setup.seed,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "generation_config": "vllm",  # not the model directory's own sampling defaults
        "logprobs_mode": "processed_logprobs",
    }
    if cache_gb := options.kv_cache_gb or (1.0 if on_cpu else None):
        found["kv_cache_memory_bytes"] = int(cache_gb * 2**30)
    if on_cpu if options.enforce_eager is None else options.enforce_eager:
        found["enforce_eager"] = True
    if options.max_lora_rank is not None:
        rank = lora_rank_of_vllm(options.max_lora_rank)
        found |= {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1}
        found["lora_target_modules"] = list(options.lora_modules)
    if on_cpu:
        # On a CPU, vLLM cannot rewind the generator of a seeded request whose prompt it split:
        # "CPU Generator does not use offset".
        found["enable_chunked_prefill"] = False
        found["max_num_batched_tokens"] = max(PREFILL_TOKENS, setup.max_model_len)
    return found


def server_arguments(
    setup: EngineSetup, options: ServerOptions, tensor_parallel: int = 1
) -> list[str]:
    """Those of Python, without the address to listen on."""
    arguments = engine_arguments(setup, options) | {
        "served_model_name": MODEL_NAME,
        "worker_extension_cls": WORKER,
        "disable_uvicorn_access_log": True,
        "disable_log_stats": True,
    }
    if tensor_parallel > 1:
        arguments["tensor_parallel_size"] = tensor_parallel
        arguments["distributed_executor_backend"] = "mp"  # not Ray, whose actor starts it
    if setup.device.type == "cpu":
        arguments["distributed_executor_backend"] = "uni"
    return ["-c", ENTRY, *_flags(arguments), *options.extra_args]


def _flags(arguments: Mapping[str, Any]) -> Iterator[str]:  # Any: as above
    """Arguments of vLLM as those of its command line."""
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{option}" if value else f"--no-{option}"
        else:
            yield f"--{option}"
            yield from map(str, value if isinstance(value, list) else [value])


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


def sampling_fields(
    params: SamplingParams, seed: int, max_tokens: int, stop_token_ids: Sequence[int]
) -> Json:
    """A request for one response, by the names that vLLM's Python and its API share."""
    fields: Json = {
        "max_tokens": max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "seed": seed,
        "stop_token_ids": list(stop_token_ids),
        "ignore_eos": True,  # only `stop_token_ids` end a response
        "logprobs": ENTROPY_TOKENS if params.entropy else 0,  # 0: of the sampled token alone
    }
    if params.stop_strings:
        fields |= {"stop": list(params.stop_strings), "include_stop_str_in_output": True}
    return fields


def sampling_request(
    model: str,
    prompt: Sequence[int],
    params: SamplingParams,
    seed: int,
    max_tokens: int,
    stop_token_ids: Sequence[int],
) -> Json:
    return {
        "model": model,
        "prompt": list(prompt),
        **sampling_fields(params, seed, max_tokens, stop_token_ids),
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


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
        reason = finish_reason(choice["finish_reason"], ids, stop_token_ids)
        entropies: tuple[float, ...] = ()
        if params.entropy:
            rows = choice["logprobs"]["top_logprobs"]
            entropies = tuple(top_entropy([*row.values()], params.temperature) for row in rows)
        if not ids or len(ids) != len(logprobs):
            raise ValueError(f"{len(ids)} tokens with {len(logprobs)} log-probs")
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise RunError(
            f"a vLLM server's answer is not a completion with token ids and log-probs ({error}): "
            "use a server of the version that docs/engines.md names"
        ) from error
    return Completion(
        token_ids=ids, logprobs=logprobs, finish_reason=reason, entropies=entropies, **origin
    )


def finish_reason(said: str, ids: Sequence[int], stop_token_ids: Sequence[int]) -> FinishReason:
    """Ours for vLLM's; raises `ValueError` for another than those of a whole response."""
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
