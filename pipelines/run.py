"""`execute`: from a resolved config to a finished run, everything closed and recorded."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Literal

from posttrain.core.artifacts import RunResult, check_free_disk
from posttrain.core.config.resolve import ResolvedRun
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.runtime.report import Reporter
from posttrain.pipelines.live import Live
from posttrain.pipelines.prefect_env import configure_prefect
from posttrain.pipelines.stops import follows_a_stop

if TYPE_CHECKING:
    from posttrain.pipelines.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What the command line adds to a config."""

    home: Path
    fresh: bool = False
    no_cache: bool = False


def execute(
    resolved: ResolvedRun, manager: PluginManager, options: RunOptions, reporter: Reporter
) -> RunResult:
    """Run the pipeline. Raises `PosttrainError` for what a user can mend.

    Whatever happens, MLflow runs are ended with the right status (KILLED after Ctrl-C or SIGTERM),
    and nothing half-written keeps its final name.
    """
    config = resolved.config
    began = time.perf_counter()
    check_free_disk(options.home, 0.0, config.limits.min_free_gb, "a run")
    options.home.mkdir(parents=True, exist_ok=True)
    configure_prefect(options.home)
    # Prefect reads its settings at import, so everything that imports it comes after.
    from posttrain.core.runtime.device import sparing_what_is_loaded
    from posttrain.pipelines.assembly import assemble
    from posttrain.pipelines.closing import close_run

    pipeline = assemble(
        resolved,
        options.home,
        manager,
        reporter,
        no_cache=options.no_cache,
        fresh=options.fresh,
    )
    status: Literal["FINISHED", "FAILED", "KILLED"] = "FAILED"
    try:
        with sparing_what_is_loaded():
            _run_flow(pipeline)
        status = "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        pipeline.engines.close()
        close_run(pipeline, status)
    return RunResult(
        run_id=pipeline.tracker.run_id,
        status="completed",
        stages={name: pipeline.results[name] for name in resolved.order},
        mlflow_uri=pipeline.tracker.uri,
        mlflow_run_id=pipeline.tracker.run_id,
        mlflow_experiment_id=pipeline.tracker.experiment_id,
        prefect_flow_run_id=pipeline.prefect_flow_run_id,
        home=options.home,
        seconds=time.perf_counter() - began,
        warnings=tuple(pipeline.warnings),
    )


def _run_flow(pipeline: Pipeline) -> None:
    """Run the Prefect flow in this thread; SIGINT and SIGTERM both end in `KeyboardInterrupt`."""
    from prefect.exceptions import TerminationSignal
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

    from posttrain.pipelines.flow import flow_for

    config = pipeline.config
    flow = flow_for(config.limits.max_parallel_stages)
    # Heartbeats find dead workers of a deployment; here they only cost a second of thread joining.
    with stop_on_signals(pipeline), temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        try:
            flow(f"{config.name}-seed{config.seed}", config.model_dump(mode="json"), Live(pipeline))
        except TerminationSignal as error:
            pipeline.stop_requested.set()
            raise KeyboardInterrupt from error
        except Exception as error:
            # An interrupt can strike inside a library that makes an error of its own of it.
            if pipeline.stop_requested.is_set() or follows_a_stop(error):
                raise KeyboardInterrupt from error
            raise


@contextmanager
def stop_on_signals(pipeline: Pipeline) -> Iterator[None]:
    """On SIGINT or SIGTERM tell stage threads to stop, and interrupt this (the main) thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        pipeline.stop_requested.set()
        raise KeyboardInterrupt

    previous = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
