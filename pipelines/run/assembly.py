"""Everything that a run needs, opened: base model, engine, store, records, MLflow's run."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml

from posttrain.core.config.differences import changes_yaml, differing_settings
from posttrain.core.config.resolve import ResolvedRun
from posttrain.core.contracts import Task
from posttrain.core.models.device import ModelRuntime, choose_dtype, set_threads
from posttrain.core.models.quiet import quiet_libraries
from posttrain.core.models.source import BaseModel, obtain
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.redaction import redacted
from posttrain.core.runtime.heap import keep_freed_memory
from posttrain.core.runtime.plugin_files import copy_files, load_file, places
from posttrain.core.runtime.reporter import Reporter
from posttrain.core.store.approval import approvals
from posttrain.core.store.artifacts import Artifact, ArtifactStore, check_free_disk
from posttrain.core.store.provenance import environment_lock, source_tags
from posttrain.core.store.run_record import RunRecorder
from posttrain.core.tracking.mlflow_store import prepare_database
from posttrain.core.tracking.mlflow_tracker import PipelineTracker
from posttrain.core.training.checkpoint import kept_checkpoints
from posttrain.pipelines.run.gates import Gates
from posttrain.pipelines.run.pipeline import Pipeline, algorithms_of, origin_of
from posttrain.pipelines.run.shared_tables import fork_tags
from posttrain.pipelines.stage.engines import EnginePool

PLUGINS = "plugins"
"""Folder of a run's record, and of its artifacts, with the files of plugins in no package."""


def assemble(
    resolved: ResolvedRun,
    home: Path,
    manager: PluginManager,
    reporter: Reporter,
    *,
    no_cache: bool,
    fresh: bool,
    store_root: Path | None = None,
    gates: Gates | None = None,
) -> Pipeline:
    """Everything a run needs, opened. Raises `PosttrainError` before MLflow's run is opened.

    `store_root` is the folder of finished stages, if it is not the home's own. Without `gates` a
    gate that nobody answered ends the run.
    """
    config = resolved.config
    set_threads(config.limits.num_threads)
    keep_freed_memory()
    quiet_libraries()
    runtime = ModelRuntime.from_config(config.model)
    task: Task[Any] = manager.task(config.task)
    for note in task.notes():
        reporter.say(f"data: {note}")
    reporter.say(f"model: {config.model.source}")
    base = obtain(config.model, home / "models")
    reporter.say(f"model: {base.origin}, digest {base.digest[:12]}")
    needed = expected_bytes(base.path, resolved)
    check_free_disk(home, needed, config.limits.min_free_gb, "this run's models and checkpoints")
    engines = EnginePool(config, manager, runtime)
    store = ArtifactStore(store_root or home / "artifacts")
    store.remove_partial()
    store.push_waiting()
    title = config.title(datetime.now(UTC).date())
    recorded = with_copies(resolved)
    tracker = start_tracking(
        recorded, manager, home, title, run_tags(base, engines, runtime), store.root
    )
    began = datetime.now(UTC).isoformat(timespec="seconds")
    kept = redacted(recorded.to_yaml())
    record = RunRecorder(home, tracker.run_id, config.name, began, kept)
    resolved = use_copies(resolved, manager, record.folder, tracker)
    for sentence in tracker.sent_before:
        reporter.say(sentence)
    if tracker.killed_runs:
        reporter.say(f"{len(tracker.killed_runs)} runs of a dead process were marked as killed")
    made = Pipeline(
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
        title=title,
        record=record,
        no_cache=no_cache,
        fresh=fresh,
        gates=gates or Gates(approvals(home)),
    )
    if origin := origin_of(made):
        tracker.set_tags({"mlflow.note.content": origin})
    return made


def with_copies(resolved: ResolvedRun) -> ResolvedRun:
    """The config as it is recorded: it names the copies of plugins' files next to it."""
    files = {name: Path(path) for name, path in resolved.config.plugin_files.items()}
    copies = {name: f"{PLUGINS}/{place}" for name, place in places(files).items()}
    return replace(resolved, config=resolved.config.model_copy(update={"plugin_files": copies}))


def use_copies(
    resolved: ResolvedRun, manager: PluginManager, folder: Path, tracker: PipelineTracker
) -> ResolvedRun:
    """Copy plugins' files into a run's folder and MLflow; the run works on with the copies.

    Raises `ResourceError` for a file that was edited since it was loaded.
    """
    files = {name: Path(path) for name, path in resolved.config.plugin_files.items()}
    copies = copy_files(files, folder / PLUGINS)
    manager.add_files(copies)
    for path in copies.values():
        load_file(path)  # the modules that are loaded, from now on with the copy as their file
    for path in sorted((folder / PLUGINS).rglob("*")):
        if path.is_file() and path.suffix not in (".pyc", ".pyo"):
            place = path.relative_to(folder)
            try:
                tracker.log_text(redacted(path.read_text("utf-8")), place.as_posix())
            except UnicodeDecodeError:  # no text: as it is
                tracker.log_file(path, place.parent.as_posix())
    named = {name: str(path) for name, path in copies.items()}
    return replace(resolved, config=resolved.config.model_copy(update={"plugin_files": named}))


def start_tracking(
    resolved: ResolvedRun,
    manager: PluginManager,
    home: Path,
    title: str,
    tags: dict[str, str],
    artifacts: Path,
) -> PipelineTracker:
    """MLflow's parent run, on the server that the environment names or in the home.

    Its files say what was asked for, what of that is not a default, which plugins do it, and what
    was installed.
    """
    algorithms = algorithms_of(resolved.config)
    if algorithms:
        tags = {**tags, "algorithm": algorithms}
    origin = resolved.config.forked_from
    if origin is not None:
        tags |= fork_tags(origin.run, origin.stage, origin.step)
    tracker = PipelineTracker.start(
        uri=os.environ.get("MLFLOW_TRACKING_URI") or prepare_database(home),
        experiment=resolved.config.name,
        run_name=f"{algorithms} {title}".strip(),
        config_yaml=resolved.to_yaml(),
        params=resolved.config.model_dump(mode="json", exclude={"stages"}),
        tags=tags,
        source=source_tags(),
        journal=home / "runs",
        artifacts=artifacts,
    )
    tracker.log_text(environment_lock(), "environment.txt")
    tracker.log_text(changes_yaml(differing_settings(resolved, manager)), "config_changes.yaml")
    tracker.log_text(plugins_yaml(resolved), "plugins.yaml")
    return tracker


def plugins_yaml(resolved: ResolvedRun) -> str:
    """The plugins of each stage with their packages' versions; `auto` engines are in the tags."""
    found = {
        stage: {f"{use.kind} {use.name}": use.origin for use in uses}
        for stage, uses in resolved.plugins.items()
    }
    return yaml.safe_dump(found, sort_keys=False)


def expected_bytes(model_dir: Path, resolved: ResolvedRun) -> float:
    """Disk a run may need: a copy per stage that makes a model, and checkpoints.

    A checkpoint holds float32 masters and two moments; the oldest one that does not stay is removed
    after the new one. Checkpoints by time (`keep.checkpoint_minutes`) are not counted: one is left
    out where the disk has no room for it.
    """
    weights = sum(path.stat().st_size for path in model_dir.glob("*.safetensors"))
    half = choose_dtype(resolved.config.model) == torch.bfloat16
    per_checkpoint = weights * (6 if half else 3)
    makers = [
        stage
        for stage in resolved.config.stages.values()
        if stage.makes in ("model", "reward_model") and not stage.passes_on
    ]
    keep = resolved.config.keep
    saves = any(getattr(stage, "checkpoint_every", 0) or keep.every for stage in makers)
    passing = (1 + keep.checkpoints) * per_checkpoint if saves else 0
    staying = sum(kept_checkpoints(getattr(stage, "steps", 0), keep) for stage in makers)
    return float(weights * len(makers) + passing + staying * per_checkpoint)


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
        "posttrain.command": redacted(" ".join(sys.argv[1:])),
    }
