"""Rollouts with vLLM inside this process; the only module that imports vllm, when it is started.

Source: Kwon et al. 2023, arXiv:2309.06180, and the vLLM project. vLLM changes its host process
(thread settings, random generators, environment, process group), and this module restores each of
them. While it runs, vLLM owns torch.distributed's default process group.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field
from torch import Tensor

from posttrain.core.contracts import EngineSetup, PluginConfig, RolloutEngine
from posttrain.core.errors import ResourceError, RunError
from posttrain.core.models.lora import check_adapter
from posttrain.core.rollout.sampling import (
    check_request,
    checked_weights,
    response_seeds,
    token_limits,
    top_entropy,
)
from posttrain.core.rollout.vllm_model import (
    adaptable,
    checkpoint_shapes,
    explained,
    lora_modules,
    repack_tied_weights,
    undisturbed_process,
    undisturbed_random,
    vllm_version,
    why_unavailable,
)
from posttrain.core.rollout.vllm_server import (
    ServerOptions,
    engine_arguments,
    finish_reason,
    sampling_fields,
)
from posttrain.core.rollout.weight_sync import check_model_dir
from posttrain.core.types import Completion, SamplingParams


class VllmEngineConfig(PluginConfig):
    """Settings of the vLLM engine."""

    gpu_memory_utilization: float = Field(
        default=0.4, gt=0, le=1, description="fraction of a GPU's memory for weights and cache"
    )
    kv_cache_gb: float | None = Field(
        default=None,
        gt=0,
        le=100_000,
        description="size of the key-value cache, GiB; null = 1 on a CPU, by utilization on a GPU",
    )
    enforce_eager: bool | None = Field(
        default=None, description="no compilation, no CUDA graphs; null = true on a CPU only"
    )
    max_num_seqs: int | None = Field(
        default=None, ge=1, description="sequences decoded together; null = the run's batch size"
    )
    max_lora_rank: int | None = Field(
        default=None, ge=1, le=512, description="largest rank of a LoRA adapter; null = no adapters"
    )


class VllmEngine(RolloutEngine[VllmEngineConfig]):
    """Samples with vLLM, in process, one request per response, each with its own seed.

    Entropies are those of the 20 likeliest tokens, renormalised, at temperature 1, of what top-k
    and top-p left: vLLM tells no more of a distribution.
    """

    name = "vllm"
    Config = VllmEngineConfig
    _setup: EngineSetup | None = None
    _llm: Any = None  # Any: vllm is optional and imported late
    _version: str = ""
    _shapes: dict[str, list[int]]
    _tied: frozenset[str] = frozenset()
    _adapter: Any = None  # Any: vllm's LoRARequest
    _adapters: int = 0

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """None when vLLM is installed, else how to install it."""
        return why_unavailable()

    def start(self, setup: EngineSetup) -> None:
        """Load the model of `setup.model_dir`; seconds on a CPU, up to a minute on a GPU."""
        reason = self.unavailable_reason()
        if reason:
            raise ResourceError(reason)
        check_model_dir(setup.model_dir)
        logger = logging.getLogger("vllm")
        if logger.level == logging.NOTSET:  # its warnings are about servers and chat templates
            logger.setLevel(logging.ERROR)
        self._shapes, self._tied = checkpoint_shapes(setup.model_dir)
        with undisturbed_process(), undisturbed_random(), explained("load this model"):
            self._llm = self._load(setup)
        self._setup, self._version, self.policy_version = setup, vllm_version(), 0

    def _load(self, setup: EngineSetup) -> Any:  # Any: vllm.LLM
        from vllm import LLM
        from vllm.platforms import current_platform

        on_cpu = setup.device.type == "cpu"
        if bool(current_platform.is_cpu()) != on_cpu:
            raise ResourceError(
                f"this build of vLLM runs on '{current_platform.device_type}', but the run is on "
                f"'{setup.device.type}': set model.device, or install the other build of vLLM"
            )
        options = ServerOptions(
            gpu_memory_utilization=self.config.gpu_memory_utilization,
            kv_cache_gb=self.config.kv_cache_gb,
            enforce_eager=self.config.enforce_eager,
            max_num_seqs=self.config.max_num_seqs or setup.max_batch_size,
            max_lora_rank=self.config.max_lora_rank,
            lora_modules=lora_modules(self._shapes),
        )
        return LLM(
            **engine_arguments(setup, options),
            trust_remote_code=False,
            # Read for stop strings alone: a request without them is not detokenized.
            skip_tokenizer_init=False,
            use_tqdm_on_load=False,
        )

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[list[Completion]]:
        """`params.num_generations` completions for each prompt, in the order of `prompts`.

        At temperature 0 log-probs are those of temperature 1. Raises `DataError` for a prompt that
        is empty or too long.
        """
        setup = self._started()
        check_request(prompts, params, setup.max_model_len)
        from vllm import SamplingParams as Request

        rows = zip(
            prompts, token_limits(prompts, params), response_seeds(prompts, params), strict=True
        )
        asked = [(prompt, limit, seed) for prompt, limit, seeds in rows for seed in seeds]
        requests = [
            Request(
                **sampling_fields(params, seed, limit, setup.stop_token_ids),
                detokenize=bool(params.stop_strings),
            )
            for _, limit, seed in asked
        ]
        inputs = [{"prompt_token_ids": list(prompt)} for prompt, _, _ in asked]
        outputs = self._answers(inputs, requests)
        found = iter(
            self._completion(output.outputs[0], seed, params)
            for output, (_, _, seed) in zip(outputs, asked, strict=True)
        )
        return [[next(found) for _ in range(params.num_generations)] for _ in prompts]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs (nats, temperature 1) of each token but the first, given those before it."""
        self._started()
        from vllm import SamplingParams as Request

        request = Request(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        inputs = [{"prompt_token_ids": list(ids)} for ids in sequences]
        outputs = self._answers(inputs, request)
        return [
            [
                float(entry[token].logprob)
                for token, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True)
            ]
            for ids, output in zip(sequences, outputs, strict=True)
        ]

    def _answers(self, inputs: Sequence[object], requests: object) -> list[Any]:  # Any: vllm's
        with undisturbed_random(), explained("sample from this model"):
            outputs: list[Any] = self._llm.generate(
                inputs, requests, use_tqdm=False, lora_request=self._adapter
            )
        return outputs

    def _completion(
        self,
        output: Any,  # Any: vllm's CompletionOutput
        seed: int,
        params: SamplingParams,
    ) -> Completion:
        ids = tuple(output.token_ids)
        entries = zip(ids, output.logprobs, strict=True)
        entropies: tuple[float, ...] = ()
        if params.entropy:
            found = ([e.logprob for e in entry.values()] for entry in output.logprobs)
            entropies = tuple(top_entropy(values, params.temperature) for values in found)
        return Completion(
            token_ids=ids,
            logprobs=tuple(float(entry[token].logprob) for token, entry in entries),
            finish_reason=finish_reason(output.finish_reason, ids, self._started().stop_token_ids),
            entropies=entropies,
            policy_version=self.policy_version,
            seed=seed,
            engine=self.name,
            engine_version=self._version,
        )

    def sync_weights(self, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Reload all weights in place, drop the adapter. Only a tied output layer may be left out.

        Raises `RunError` on a missing, unknown or misshaped weight and keeps the old weights: vLLM
        itself would keep some old weights with no more than a log line.
        """
        setup = self._started()
        given = checked_weights(weights, self._shapes, self._tied)
        pairs = ((name, tensor.detach().to(setup.dtype)) for name, tensor in given.items())
        with undisturbed_process(), undisturbed_random():
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": pairs})
            if self._tied and setup.device.type == "cpu":
                self._llm.apply_model(repack_tied_weights)
            # Keys and values of the old weights must not serve the new ones.
            if not self._llm.reset_prefix_cache():
                raise RunError("vLLM kept its prefix cache after a weight sync: restart the run")
        self.policy_version, self._adapter = policy_version, None

    def sync_adapter(self, folder: Path, policy_version: int) -> None:
        """Load the adapter under a new id, so that no cache takes it for the one before."""
        self._started()
        if self.config.max_lora_rank is None:
            raise RunError("the vllm engine takes no adapters: set engine.max_lora_rank")
        check_adapter(folder, adaptable(self._shapes), self.config.max_lora_rank)
        from vllm.lora.request import LoRARequest

        self._adapters += 1
        request = LoRARequest(f"adapter-{self._adapters}", self._adapters, str(folder))
        with undisturbed_process(), undisturbed_random():
            self._llm.llm_engine.add_lora(request)
        self._adapter, self.policy_version = request, policy_version

    def close(self) -> None:
        """Shut vLLM down and free its process group; may be called twice."""
        if self._llm is None:
            return
        with undisturbed_process():
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = self._setup = self._adapter = None
        gc.collect()

    def _started(self) -> EngineSetup:
        if self._setup is None:
            raise RunError("the vllm engine is not running: call start() before using it")
        return self._setup
