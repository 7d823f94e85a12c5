"""What must be true of vLLM servers that were given by URL, before they are trusted with a run."""

from __future__ import annotations

import json
from collections.abc import Sequence

import httpx

from posttrain.core.contracts import EngineSetup
from posttrain.core.errors import ResourceError
from posttrain.core.serving.replicas import Json, Replica
from posttrain.core.serving.vllm_command import WORKER, dtype_name

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


async def get_json(client: httpx.AsyncClient, replica: Replica, path: str) -> Json:
    """The JSON object at `path`. Raises `ResourceError` when there is none."""
    try:
        answer = await client.get(f"{replica.url}{path}")
        found = answer.json() if answer.status_code == 200 else None
        reason = f"it answered {answer.status_code}"
    except (httpx.HTTPError, json.JSONDecodeError) as error:
        found, reason = None, f"{type(error).__name__} {error}"
    if not isinstance(found, dict):
        raise ResourceError(
            f"{replica.url}{path} could not be read ({reason}): is it a vLLM server with "
            f"VLLM_SERVER_DEV_MODE=1? {ADVICE}"
        )
    return found


async def check_given_servers(
    client: httpx.AsyncClient,
    replicas: Sequence[Replica],
    setup: EngineSetup,
    lora: bool,
) -> None:
    """Raise `ResourceError` for a server whose samples or weights would not be what a run needs."""
    for replica in replicas:
        info = await get_json(client, replica, "/server_info?config_format=json")
        problems = list(_problems(info["vllm_config"], setup, lora))
        if problems:
            raise ResourceError(f"vLLM server {replica.url}: {'; '.join(problems)}: {ADVICE}")


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
            f"vLLM server {replica.url} serves another model: {'; '.join(other)}: {ADVICE}"
        )
