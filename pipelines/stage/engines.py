"""One rollout engine for a whole run: started once, given each stage's weights in turn."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from posttrain.core.cluster.shared import ServerPlaces
from posttrain.core.config.preference_stages import PreferenceStage
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.config.schema import RunConfig
from posttrain.core.contracts import EngineSetup, RolloutEngine
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import ResourceError
from posttrain.core.models.device import ModelRuntime, is_cuda
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.rollout.weight_sync import stored_weights
from posttrain.core.runtime.seeding import derive_seed
from posttrain.pipelines.stage.inputs import load_tokenizer


def choose_engine(config: RunConfig, manager: PluginManager, runtime: ModelRuntime) -> str:
    """Name of the engine to use. `auto`: vllm on CUDA where it is installed, else transformers.

    On a CPU `transformers` wins at the lengths and batches a CPU can train on: it computes each
    group's prompt once and starts in a second.
    """
    if not isinstance(config.engine, str):
        return config.engine.name
    vllm = manager.find("rollout_engine", "vllm").cls
    assert issubclass(vllm, RolloutEngine)
    if is_cuda(runtime.device) and vllm.unavailable_reason() is None:
        return "vllm"
    return "transformers"


def largest_request(config: RunConfig) -> int:
    """Most sequences that any stage samples at once: what the engine makes room for."""
    sizes = [stage.max_sequences() for stage in config.stages.values()]
    return max(config.evaluation.batch_size, *sizes)


def adapter_rank(config: RunConfig) -> int | None:
    """Rank of the largest adapter that a stage gives its engine; None when none does."""
    loras = [
        stage.lora
        for stage in config.stages.values()
        if isinstance(stage, RlStage)
        or (isinstance(stage, PreferenceStage) and stage.online is not None)
    ]
    return max((lora.rank for lora in loras if lora is not None), default=None)


def engine_fields(config: RunConfig, manager: PluginManager, name: str) -> dict[str, object]:
    """The engine's settings; room for the adapters of the run's stages, unless set otherwise."""
    fields = {} if isinstance(config.engine, str) else dict(config.engine.fields())
    rank, known = adapter_rank(config), manager.find("rollout_engine", name)
    if rank is not None and "max_lora_rank" in known.cls.Config.model_fields:
        # A resolved config has every field; null is the default.
        fields["max_lora_rank"] = fields.get("max_lora_rank") or rank
    return fields


def engine_places(config: RunConfig) -> ServerPlaces | None:
    """Where servers run if not on this machine. Reads the nodes of the cluster that was joined."""
    if config.cluster is None or config.cluster.engines is None:
        return None
    section, gpus = config.cluster.engines, config.cluster.engines.gpus
    if gpus is None:
        from posttrain.core.cluster.on_ray.connection import nodes  # Ray is an extra

        gpus = int(config.model.device != "cpu" and any(node.gpus for node in nodes()))
    limit = config.cluster.ray.start_timeout_s
    return ServerPlaces(section.replicas, section.cpus, gpus, limit)


class EnginePool:
    """Lends the run's engine to one stage at a time."""

    def __init__(self, config: RunConfig, manager: PluginManager, runtime: ModelRuntime) -> None:
        self.config, self.manager, self.runtime = config, manager, runtime
        self.name = choose_engine(config, manager, runtime)
        self._engine: RolloutEngine[Any] | None = None
        self._ends: tuple[int, ...] = ()
        self._lock = threading.Lock()
        self._waiting = {n for n, stage in config.stages.items() if stage.max_sequences() > 0}

    @contextmanager
    def lease(self, model_dir: Path) -> Iterator[RolloutEngine[Any]]:
        """The engine with the weights of `model_dir`, at policy version 0."""
        with self._lock:
            tokenizer = load_tokenizer(model_dir, self.config, self.manager)
            if self._engine is not None and self._ends != tokenizer.end_token_ids:
                self.close()  # an engine keeps the end tokens that it was started with
            if self._engine is None:
                self._engine = self._start(model_dir, tokenizer)
                self._ends = tokenizer.end_token_ids
            else:
                self._engine.sync_weights(stored_weights(model_dir), policy_version=0)
                self._check_weights(self._engine, model_dir, tokenizer)
            yield self._engine

    def stage_ended(self, name: str) -> None:
        """Stop the engine when no stage is left that samples, or stages are not to keep it.

        What follows then has the memory, and the cluster's GPUs, that the engine had. Where another
        stage has the engine, that one's end decides.
        """
        samples = self.config.stages[name].max_sequences() > 0
        self._waiting.discard(name)
        keeps = self.config.limits.keep_engine and self._waiting
        if samples and not keeps and self._lock.acquire(blocking=False):
            try:
                self.close()
            finally:
                self._lock.release()

    def _check_weights(
        self, engine: RolloutEngine[Any], model_dir: Path, tokenizer: ChatTokenizer
    ) -> None:
        """Raise `RunError` unless `engine` has the weights of `model_dir`."""
        # Late: it imports transformers' models, and a run may reuse every stage.
        from posttrain.core.training.sync_check import check_stored

        limit = self.config.model.max_model_len
        check_stored(engine, model_dir, self.runtime, tokenizer, limit)

    def close(self) -> None:
        """Stop the engine."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _start(self, model_dir: Path, tokenizer: ChatTokenizer) -> RolloutEngine[Any]:
        fields = engine_fields(self.config, self.manager, self.name)
        engine: RolloutEngine[Any] = self.manager.build(RolloutEngine, self.name, fields)
        reason = type(engine).unavailable_reason()
        if reason is not None:
            raise ResourceError(f"engine '{self.name}' cannot run here: {reason}")
        engine.start(
            EngineSetup(
                model_dir=model_dir,
                dtype=self.runtime.dtype,
                device=self.runtime.device,
                max_model_len=self.config.model.max_model_len,
                max_batch_size=largest_request(self.config),
                stop_token_ids=tokenizer.end_token_ids,
                pad_token_id=tokenizer.pad_token_id,
                seed=derive_seed(self.config.seed, "engine") % 2**31,
                places=engine_places(self.config),
            )
        )
        return engine
