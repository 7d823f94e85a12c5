"""Builds a `Pipeline`: base model, task, engine pool, artifact store, MLflow's parent run."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.utils.tqdm import disable_progress_bars

from posttrain.core.artifacts import Artifact, ArtifactStore, check_free_disk
from posttrain.core.config.dag import makes
from posttrain.core.config.resolve import ResolvedRun
from posttrain.core.contracts import Task
from posttrain.core.models.loading import ModelRuntime
from posttrain.core.models.source import BaseModel, obtain
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.runtime.device import choose_dtype, keep_freed_memory, set_threads
from posttrain.core.runtime.report import Reporter
from posttrain.core.tracking.mlflow_store import prepare_database
from posttrain.core.tracking.mlflow_tracker import PipelineTracker
from posttrain.pipelines.engines import EnginePool
from posttrain.pipelines.pipeline import Pipeline


def assemble(
    resolved: ResolvedRun,
    home: Path,
    manager: PluginManager,
    reporter: Reporter,
    *,
    no_cache: bool,
    fresh: bool,
) -> Pipeline:
    """Everything a run needs, opened. Raises `PosttrainError` before MLflow's run is opened."""
    config = resolved.config
    set_threads(config.limits.num_threads)
    keep_freed_memory()
    quiet_libraries()
    runtime = ModelRuntime.from_config(config.model)
    task: Task[Any] = manager.build(Task, config.task.name, config.task.fields())
    reporter.say(f"model: {config.model.source}")
    base = obtain(config.model, home / "models")
    reporter.say(f"model: {base.origin}, digest {base.digest[:12]}")
    needed = expected_bytes(base.path, resolved)
    check_free_disk(home, needed, config.limits.min_free_gb, "this run's models and checkpoints")
    engines = EnginePool(config, manager, runtime)
    uri = os.environ.get("MLFLOW_TRACKING_URI") or prepare_database(home)
    store = ArtifactStore(home / "artifacts")
    store.remove_partial()
    tracker = PipelineTracker.start(
        uri=uri,
        experiment=config.name,
        run_name=f"{config.name}-seed{config.seed}",
        config_yaml=resolved.to_yaml(),
        params=config.model_dump(mode="json", exclude={"stages"}),
        tags=run_tags(base, engines, runtime),
        journal=home / "runs",
    )
    if tracker.killed_runs:
        reporter.say(f"{len(tracker.killed_runs)} runs of a dead process were marked as killed")
    return Pipeline(
        resolved=resolved,
        home=home,
        manager=manager,
        task=task,
        runtime=runtime,
        engines=engines,
        store=store,
        tracker=tracker,
        reporter=reporter,
        base=base_artifact(base),
        no_cache=no_cache,
        fresh=fresh,
    )


def expected_bytes(model_dir: Path, resolved: ResolvedRun) -> float:
    """Disk a run may need: a copy per stage that makes a model, and checkpoints.

    A checkpoint holds float32 masters and two moments; the old one is removed after the new one.
    """
    weights = sum(path.stat().st_size for path in model_dir.glob("*.safetensors"))
    half = choose_dtype(resolved.config.model) == torch.bfloat16
    per_checkpoint = weights * (6 if half else 3)
    makers = [s for s in resolved.config.stages.values() if makes(s) in ("model", "reward_model")]
    saves = any(getattr(stage, "checkpoint_every", 0) for stage in makers)
    return float(weights * len(makers) + (2 * per_checkpoint if saves else 0))


def base_artifact(base: BaseModel) -> Artifact:
    """The base model as an artifact that no stage made."""
    return Artifact(kind="model", uri=str(base.path), digest=base.digest, stage="base")


def run_tags(base: BaseModel, engines: EnginePool, runtime: ModelRuntime) -> dict[str, str]:
    """What made this run: versions, engine, precision, base model."""
    return {
        "posttrain.version": importlib.metadata.version("posttrain"),
        "posttrain.engine": engines.name,
        "posttrain.dtype": str(runtime.dtype).removeprefix("torch."),
        "posttrain.device": str(runtime.device),
        "posttrain.base_model": base.origin,
        "posttrain.base_digest": base.digest,
        "posttrain.python": platform.python_version(),
        "posttrain.torch": torch.__version__,
        "posttrain.transformers": transformers.__version__,
        "posttrain.command": " ".join(sys.argv[1:]),
    }


def quiet_libraries() -> None:
    """Our own progress display is the only one: libraries' bars and notices would break it up."""
    disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
