"""Rollouts with vLLM servers over HTTP: replicas started here, or given by URL.

Source: vLLM's OpenAI-compatible server (docs.vllm.ai, 0.32). This module holds the
settings of servers, requests and weight sync; `posttrain.core.rollout.vllm_fleet` does the work.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pydantic import Field, model_validator
from torch import Tensor

from posttrain.core.cluster.servers import SentFiles, Server
from posttrain.core.cluster.shared import ServerPlaces
from posttrain.core.contracts import EngineSetup, PluginConfig, RolloutEngine, WeightSource
from posttrain.core.errors import ResourceError, RunError
from posttrain.core.models.lora import check_adapter
from posttrain.core.rollout.replicas import Limits
from posttrain.core.rollout.sampling import (
    check_request,
    check_shapes,
    checked_weights,
    response_seeds,
    token_limits,
)
from posttrain.core.rollout.vllm_fleet import FleetLimits, VllmFleet, local_server
from posttrain.core.rollout.vllm_model import (
    adaptable,
    checkpoint_shapes,
    lora_modules,
    why_unavailable,
)
from posttrain.core.rollout.vllm_server import (
    ServerOptions,
    dtype_name,
    read_completion,
    read_scores,
    sampling_request,
    scoring_request,
    server_arguments,
    server_variables,
)
from posttrain.core.rollout.weight_sync import (
    check_model_dir,
    sent,
    share_folder,
    share_weights,
    stored_weights,
    write_weights,
)
from posttrain.core.runtime.locks import SharedLock
from posttrain.core.types import Completion, SamplingParams

if TYPE_CHECKING:
    from posttrain.core.cluster.on_ray.servers import RayServers


class VllmServerConfig(PluginConfig):
    """Settings of the vLLM servers and of the requests to them."""

    replicas: int | None = Field(
        default=None,
        ge=1,
        le=1_024,
        description="servers to start on this machine; null = 1, or none by URL",
    )
    urls: tuple[str, ...] = Field(
        default=(), description="servers that run already, started as docs/engines.md says"
    )
    sync_dir: Path | None = Field(
        default=None,
        description="folder for weights on their way to the servers, which all of them can read; "
        "null = the system's temporary folder",
    )
    startup_timeout_s: float = Field(
        default=600, gt=0, le=86_400, description="seconds that servers may take until they answer"
    )
    request_timeout_s: float = Field(
        default=600,
        gt=0,
        le=86_400,
        description="seconds without an answer after which a request has failed",
    )
    max_retries: int = Field(
        default=3,
        ge=0,
        le=1_000,
        description="further tries of a request that failed at a living server",
    )
    max_concurrency: int | None = Field(
        default=None,
        ge=1,
        le=100_000,
        description="requests in flight per server; null = max_num_seqs",
    )
    max_num_seqs: int | None = Field(
        default=None, ge=1, description="sequences decoded together; null = the run's batch size"
    )
    max_lora_rank: int | None = Field(
        default=None, ge=1, le=512, description="largest rank of a LoRA adapter; null = no adapters"
    )
    restarts: int = Field(
        default=3,
        ge=0,
        le=1_000,
        description="how often a server that the run started is started again after it was lost",
    )
    gpu_memory_utilization: float = Field(
        default=0.4, gt=0, le=1, description="fraction of a GPU's memory, per server"
    )
    kv_cache_gb: float | None = Field(
        default=None,
        gt=0,
        le=100_000,
        description="key-value cache per server, GiB; null = 1 on a CPU, by utilization on a GPU",
    )
    enforce_eager: bool | None = Field(
        default=None, description="no compilation, no CUDA graphs; null = true on a CPU only"
    )
    num_threads: int | None = Field(
        default=None, ge=1, le=10_000, description="CPU threads per server; null = cores / replicas"
    )
    gpus: tuple[str, ...] = Field(
        default=(),
        description="CUDA_VISIBLE_DEVICES of each server started here; empty = that of the run",
    )
    extra_args: tuple[str, ...] = Field(
        default=(), description="further arguments of the servers' command line"
    )

    @model_validator(mode="after")
    def _servers_come_from_one_place(self) -> VllmServerConfig:
        if self.urls and (self.replicas or self.gpus or self.extra_args):
            raise ValueError(
                "servers given by `urls` are not started here: leave out `replicas`, `gpus` and "
                "`extra_args`"
            )
        if bad := [url for url in self.urls if not url.startswith(("http://", "https://"))]:
            raise ValueError(f"expected URLs like 'http://127.0.0.1:8000', got {bad[0]!r}")
        if len(set(self.urls)) < len(self.urls):
            raise ValueError("each server once: a URL is given twice")
        if self.gpus and len(self.gpus) != (self.replicas or 1):
            raise ValueError(f"{len(self.gpus)} gpus for {self.replicas or 1} replicas")
        return self


class VllmServerEngine(RolloutEngine[VllmServerConfig]):
    """Samples at vLLM servers, one request per response, each with its own seed.

    Token ids go there and come back. Entropies are those of the 20 likeliest tokens, renormalised.
    How requests batch at a server depends on when they arrive, so equal seeds give equal tokens as
    long as no two candidates of a draw are within rounding of each other.
    """

    name = "vllm_server"
    Config = VllmServerConfig
    calls_at_once = 64
    _setup: EngineSetup | None = None
    _fleet: VllmFleet | None = None
    _shapes: dict[str, list[int]]
    _tied: frozenset[str] = frozenset()
    _servers: RayServers | None = None
    _kept: SentFiles | None = None
    _adapter: SentFiles | None = None
    _syncs: int = 0
    _unknown_weights: str = ""

    def __init__(self, config: VllmServerConfig) -> None:
        super().__init__(config)
        # A sync waits for the samples of the old weights, and samples wait for a sync.
        self._use = SharedLock()

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """None when vLLM is installed, else how to install it."""
        return why_unavailable()

    def start(self, setup: EngineSetup) -> None:
        """Start the servers (about a minute on a CPU), or check those given and sync them."""
        config = self.config
        reason = None if config.urls else self.unavailable_reason()
        if reason:
            raise ResourceError(reason)
        check_model_dir(setup.model_dir)
        self._shapes, self._tied = checkpoint_shapes(setup.model_dir)
        places = setup.places
        count = places.replicas if places else len(config.urls) or config.replicas or 1
        sequences = config.max_num_seqs or setup.max_batch_size
        requests = Limits(config.max_concurrency or sequences, config.max_retries)
        limits = FleetLimits(
            config.startup_timeout_s, config.request_timeout_s, requests, config.restarts
        )
        self._fleet = VllmFleet(count, limits, dtype_name(setup.dtype), config.sync_dir)
        self._setup, self.policy_version, self._unknown_weights = setup, 0, ""
        self.fetches_weights = places is not None
        try:
            if config.urls:
                self._fleet.use_given(config.urls, setup, config.max_lora_rank is not None)
                self.sync_weights(stored_weights(setup.model_dir), 0)
            elif places is not None:
                self._start_on_cluster(self._fleet, setup, sequences, places)
            else:
                self._start_here(self._fleet, setup, sequences, count)
        except BaseException:
            self.close()
            raise

    def _start_here(self, fleet: VllmFleet, setup: EngineSetup, sequences: int, count: int) -> None:
        options = self._options(sequences, max(1, (os.cpu_count() or 1) // count))
        env = {**os.environ, **server_variables(setup, options)}
        gpus = [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in self.config.gpus] or [{}] * count
        arguments = server_arguments(setup, options)
        start = local_server(arguments, [{**env, **gpu} for gpu in gpus], fleet)
        fleet.start_servers(count, start)

    def _start_on_cluster(
        self, fleet: VllmFleet, setup: EngineSetup, sequences: int, places: ServerPlaces
    ) -> None:
        from posttrain.core.cluster.on_ray.servers import RayServers  # Ray is an extra

        setup = replace(setup, device=torch.device("cuda" if places.gpus else "cpu"))
        options = self._options(sequences, places.cpus)
        arguments = server_arguments(setup, options, tensor_parallel=places.gpus)
        variables = server_variables(setup, options)
        limits = fleet.limits
        self._servers = RayServers(
            places, limits.request_timeout_s, 4 + limits.requests.max_concurrency
        )
        servers = self._servers
        servers.place(lambda: None)

        async def start(index: int) -> Server:
            return await servers.start(index, arguments, variables)

        fleet.start_servers(places.replicas, start)

    def _options(self, sequences: int, threads: int) -> ServerOptions:
        config = self.config
        return ServerOptions(
            gpu_memory_utilization=config.gpu_memory_utilization,
            kv_cache_gb=config.kv_cache_gb,
            enforce_eager=config.enforce_eager,
            max_num_seqs=sequences,
            max_lora_rank=config.max_lora_rank,
            lora_modules=lora_modules(self._shapes),
            num_threads=config.num_threads or threads,
            extra_args=config.extra_args,
        )

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[list[Completion]]:
        """`params.num_generations` completions for each prompt, in the order of `prompts`.

        At temperature 0 log-probs are those of temperature 1. Raises `DataError` for a prompt that
        is empty or too long, `RunError` when no server is left.
        """
        with self._use.together():
            fleet, setup = self._ready()
            check_request(prompts, params, setup.max_model_len)
            stops, name = setup.stop_token_ids, fleet.model_name
            rows = zip(
                prompts, token_limits(prompts, params), response_seeds(prompts, params), strict=True
            )
            requests = [
                sampling_request(name, prompt, params, seed, limit, stops)
                for prompt, limit, seeds in rows
                for seed in seeds
            ]
            answers = fleet.complete(requests)
            origin = {
                "policy_version": self.policy_version,
                "engine": self.name,
                "engine_version": fleet.version,
            }
            found = iter(
                read_completion(answer, params, stops, {"seed": request["seed"], **origin})
                for answer, request in zip(answers, requests, strict=True)
            )
            return [[next(found) for _ in range(params.num_generations)] for _ in prompts]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs (nats, temperature 1) of each token but the first, given those before it."""
        with self._use.together():
            fleet, _ = self._ready()
            answers = fleet.complete([scoring_request(fleet.model_name, s) for s in sequences])
            return [read_scores(a, ids) for a, ids in zip(answers, sequences, strict=True)]

    def sync_weights(self, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Give all servers the same weights, through files, and drop the adapter.

        Raises `RunError` on a missing, unknown or misshaped weight, before any server hears of it,
        and when no server takes them: then the engine answers no more until a sync succeeds.
        """
        with self._use.alone():
            fleet, setup = self._started()
            given = checked_weights(weights, self._shapes, self._tied)
            self._syncs += 1
            if self.fetches_weights:
                files = sent(share_weights(given, setup.dtype).files)
            else:
                files = write_weights(fleet.folder, f"weights-{self._syncs}", given, setup.dtype)
            self._load(fleet, files, policy_version)

    def sync_from(self, source: WeightSource, policy_version: int) -> None:
        """As `sync_weights`; servers on a cluster fetch what the ranks have put there."""
        if not self.fetches_weights:
            super().sync_from(source, policy_version)
            return
        with self._use.alone():
            fleet, setup = self._started()
            shared = source.shared(setup.dtype, self._tied)
            check_shapes(shared.shapes, self._shapes, self._tied)
            self._load(fleet, sent(shared.files), policy_version, source.check)

    def _load(
        self,
        fleet: VllmFleet,
        files: SentFiles,
        policy_version: int,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._unknown_weights = "the last weight sync failed"
        try:
            fleet.load_weights(files, check)
        except BaseException:
            _remove(files)
            raise
        self.policy_version, self._unknown_weights = policy_version, ""
        # A server that is started again reads them; one that was given never is.
        _remove(files if self.config.urls else self._kept)
        _remove(self._adapter)
        self._kept, self._adapter = files, None

    def sync_adapter(self, folder: Path, policy_version: int) -> None:
        """Load a copy of the adapter under a new name at all servers; see the contract."""
        with self._use.alone():
            fleet, _ = self._ready()
            if self.config.max_lora_rank is None:
                raise RunError("the servers take no adapters: set engine.max_lora_rank")
            check_adapter(folder, adaptable(self._shapes), self.config.max_lora_rank)
            self._syncs += 1
            name = f"adapter-{self._syncs}"
            if self.fetches_weights:
                files = share_folder(folder)
            else:
                copy = fleet.folder / name
                shutil.copytree(folder, copy)
                files = SentFiles("", folder=copy)
            try:
                fleet.load_adapter(name, files)
            except RunError:
                _remove(files)
                raise
            _remove(self._adapter)
            self._adapter, self.policy_version = files, policy_version

    def close(self) -> None:
        """Stop the servers that were started here; may be called twice."""
        fleet, self._fleet, self._setup = self._fleet, None, None
        self._kept = self._adapter = None
        if fleet is not None:
            fleet.close()
        if self._servers is not None:
            self._servers.close()
            self._servers = None

    def _started(self) -> tuple[VllmFleet, EngineSetup]:
        if self._fleet is None or self._setup is None:
            raise RunError("the vllm_server engine is not running: call start() before using it")
        return self._fleet, self._setup

    def _ready(self) -> tuple[VllmFleet, EngineSetup]:
        fleet, setup = self._started()
        if self._unknown_weights:
            raise RunError(f"the vLLM servers cannot be used: {self._unknown_weights}")
        return fleet, setup


def _remove(files: SentFiles | None) -> None:
    if files is not None and files.folder is not None:
        shutil.rmtree(files.folder, ignore_errors=True)
