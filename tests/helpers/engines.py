"""Rollout engines under test: started on a tiny model, in addition to the plain model they must
equal.
"""

from __future__ import annotations

import os
import random
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from posttrain.core.contracts import EngineSetup, RolloutEngine
from posttrain.core.types import Completion, SamplingParams
from posttrain.plugins.engines.transformers import TransformersEngine, TransformersEngineConfig
from posttrain.plugins.engines.vllm import VllmEngine, VllmEngineConfig
from posttrain.plugins.engines.vllm_server import VllmServerConfig, VllmServerEngine

AnyEngine = RolloutEngine[Any]  # Any: engines of every config type
# Enough characters that a random model soon says one of them. Its own end-of-sequence token is not
# among them: only these may end a response.
STOP = (30, 41, 52, 63, 74, 85, 96)
MAX_LEN = 320
LOGPROB_TOLERANCE = {"transformers": 1e-4, "vllm": 2e-3, "vllm_server": 2e-3}


@dataclass(frozen=True)
class Host:
    """What an engine must leave as it was in the process that it runs in."""

    threads: int
    set_num_threads: object
    torch_random: list[int]
    numpy_random: list[int]
    python_random: object
    interrupt_handler: object
    cores: frozenset[int]
    environment: dict[str, str]

    @classmethod
    def now(cls) -> Host:
        """The present state."""
        return cls(
            threads=torch.get_num_threads(),
            set_num_threads=torch.set_num_threads,
            torch_random=torch.get_rng_state().tolist(),
            numpy_random=np.random.get_state(legacy=False)["state"]["key"].tolist(),
            python_random=random.getstate(),
            interrupt_handler=signal.getsignal(signal.SIGINT),
            cores=frozenset(os.sched_getaffinity(0)),
            environment={
                key: value
                for key, value in os.environ.items()
                if not key.startswith(("VLLM_", "PYTEST_", "_TORCHINDUCTOR"))
            },
        )


@dataclass(frozen=True)
class Running:
    """A started engine with the models it is compared with."""

    engine: AnyEngine
    setup: EngineSetup
    model: Any  # Any: transformers' model classes are not typed
    other: Any  # the same architecture with other weights
    prompts: list[list[int]]
    host_before: Host
    host_started: Host

    @property
    def tolerance(self) -> float:
        return LOGPROB_TOLERANCE[self.engine.name]

    def one(self, prompt: list[int], params: SamplingParams) -> list[Completion]:
        return self.engine.generate([prompt], params)[0]


def make_engine(name: str, **fields: Any) -> AnyEngine:  # Any: config fields
    if name == "vllm":
        return VllmEngine(VllmEngineConfig(kv_cache_gb=0.25, max_lora_rank=8, **fields))
    if name == "vllm_server":
        fields = {"replicas": 1, "num_threads": 1, "max_lora_rank": 8, "restarts": 0, **fields}
        return VllmServerEngine(VllmServerConfig(kv_cache_gb=0.25, **fields))
    return TransformersEngine(TransformersEngineConfig(**fields))


def make_setup(folder: Path, batch: int = 32) -> EngineSetup:
    return EngineSetup(
        model_dir=folder,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_model_len=MAX_LEN,
        max_batch_size=batch,
        stop_token_ids=STOP,
        pad_token_id=0,
        seed=3,
    )


def next_logprobs(model: Any, ids: list[int], temperature: float = 1.0) -> Tensor:
    """Log-softmax(logits / temperature) [len(ids), V] of a plain forward pass over `ids`."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([ids])).logits[0]
    return (logits / temperature).log_softmax(dim=-1)


def teacher_forced(
    model: Any, prompt: list[int], completion: Completion, temperature: float = 1.0
) -> Tensor:
    """Distributions [T, V] that the tokens of `completion` are drawn from, without any cut."""
    ids = [*prompt, *completion.token_ids]
    return next_logprobs(model, ids, temperature)[len(prompt) - 1 : -1]


def assert_logprobs(
    running: Running,
    model: Any,
    groups: list[list[Completion]],
    temperature: float = 1.0,
    prompts: list[list[int]] | None = None,
) -> None:
    """The engine's log-probs are those of `model` at the sampled tokens (of the usual prompts)."""
    for prompt, group in zip(prompts or running.prompts, groups, strict=True):
        for completion in group:
            expected = teacher_forced(model, prompt, completion, temperature)
            ids = torch.tensor(completion.token_ids)
            torch.testing.assert_close(
                torch.tensor(completion.logprobs),
                expected.gather(-1, ids[:, None])[:, 0],
                rtol=0,
                atol=running.tolerance,
            )


def assert_same(
    running: Running, first: list[list[Completion]], second: list[list[Completion]]
) -> None:
    """Equal completions; from servers, where requests batch as they arrive, but for rounding."""
    if running.engine.name != "vllm_server":
        assert first == second
        return
    for one, other in zip(sum(first, []), sum(second, []), strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert replace(one, logprobs=()) == replace(other, logprobs=())


def make_adapter(folder: Path, model_dir: Path, seed: int, rank: int = 4) -> Any:
    """Save a LoRA adapter with random B to `folder`; the model with it merged, as peft does."""
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    targets = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, lora_dropout=0.0)
    adapted = get_peft_model(model, config)
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=draw) * 0.1
    adapted.save_pretrained(folder)
    return adapted.merge_and_unload()


def ids_of(groups: list[list[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[completion.token_ids for completion in group] for group in groups]
