"""`execute`: from a resolved config to a finished run, everything closed and recorded."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Literal

from posttrain.core.config.resolve import ResolvedRun
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.redaction import redacted_tree
from posttrain.core.runtime.reporter import Reporter
from posttrain.core.store.approval import Answer, approvals
from posttrain.core.store.artifacts import RunResult, check_free_disk, make_folder
from posttrain.pipelines.rl.live import Live
from posttrain.pipelines.run.cluster import joined_cluster
from posttrain.pipelines.run.gates import Ask, Gates, check_answers
from posttrain.pipelines.run.prefect_env import (
    configure_prefect,
    inside_a_flow_run,
    set_environment,
)
from posttrain.pipelines.run.prefect_server import OwnServer
from posttrain.pipelines.run.progress import FileReporter, Reporters
from posttrain.pipelines.run.rounds import Begun, begin
from posttrain.pipelines.run.settling import nothing_new, raise_if_closed, settle, take_up
from posttrain.pipelines.run.stops import STOPS, follows_a_stop, never, noted_stops
from posttrain.pipelines.run.store import require_folders, require_store

if TYPE_CHECKING:
    from posttrain.pipelines.run.pipeline import Pipeline


SAME_STOP_S = 1.0
"""Signals within this time are one request to stop; one that comes later ends the run at once."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What the command line adds to a config.

    `answers` are given to gates beforehand, by stage or for all; `ask` asks a person at a gate that
    has none. Without it such a gate ends the run. `server` is the run's own Prefect server if it
    was started already. `stop` is set by whoever wants the run to end at the next safe point;
    `owns_process` says that a second signal may end the process. `opened` is called with the run
    before its first stage.
    """

    home: Path
    store: Path
    fresh: bool = False
    no_cache: bool = False
    answers: Mapping[str, Answer] = field(default_factory=dict)
    ask: Ask | None = None
    server: OwnServer | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    owns_process: bool = True
    opened: Callable[[Pipeline], None] = lambda pipeline: None


def execute(
    resolved: ResolvedRun, manager: PluginManager, options: RunOptions, reporter: Reporter
) -> RunResult:
    """Run the pipeline. Raises `PosttrainError` for what a user can fix.

    `ApprovalNeeded` and `ApprovalRefused` end a run whose gate is not passed, with everything
    before it kept. Without new data for a stage that needs some nothing is run: the status is then
    `no_new_data`.

    Whatever happens, MLflow runs are ended with the right status (KILLED after Ctrl-C or SIGTERM),
    and nothing half-written keeps its final name.
    """
    began = time.perf_counter()
    if not inside_a_flow_run():
        set_environment(options.home)  # refused before anything is written
    for folder in (options.home, options.store):
        check_free_disk(folder, 0.0, resolved.config.limits.min_free_gb, "a run")
        make_folder(folder)
    require_folders(options.home, options.store)
    require_store(options.store)
    check_answers(resolved, options.answers)
    begun = begin(resolved, manager, options.home, store=options.store, fresh=options.fresh)
    try:
        if begun.nothing_new:
            reporter.say(begun.nothing_new)
            return nothing_new(begun, options.home, time.perf_counter() - began)
        return _execute(begun, manager, options, reporter, began)
    finally:
        begun.close()


def _execute(
    begun: Begun,
    manager: PluginManager,
    options: RunOptions,
    reporter: Reporter,
    began: float,
) -> RunResult:
    resolved = begun.resolved
    # Inside a deployed run Prefect is at work already, with the settings of its worker.
    server = None
    if not inside_a_flow_run():
        configure_prefect(options.home)
        # Prefect reads its settings at import, so everything that imports it comes after.
        server = options.server or OwnServer(options.home)
        server.begin()
    from posttrain.core.runtime.collector import sparing_what_is_loaded
    from posttrain.pipelines.run.assembly import assemble
    from posttrain.pipelines.run.closing import close_run

    pipeline = assemble(
        resolved,
        options.home,
        manager,
        reporter,
        no_cache=options.no_cache,
        gates=Gates(approvals(options.home), options.answers, options.ask),
        fresh=options.fresh,
        store_root=options.store,
    )
    pipeline.deployed = inside_a_flow_run()
    pipeline.stop_requested = options.stop
    pipeline.watchdog.owns_process = options.owns_process
    log = FileReporter(options.home / "runs" / pipeline.tracker.run_id / "log.txt")
    pipeline.reporter = Reporters([reporter, log])
    take_up(pipeline, begun)
    options.opened(pipeline)
    status: Literal["FINISHED", "FAILED", "KILLED"] = "FAILED"
    try:
        if server is not None:
            server.wait()
        with (
            sparing_what_is_loaded(),
            joined_cluster(pipeline.config, options.home),
            closing(pipeline.engines),  # servers on the cluster end before it is left
            pipeline.watchdog,
        ):
            _run_flow(pipeline, owns_process=options.owns_process)
        status = settle(pipeline, begun)
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        pipeline.engines.close()
        close_run(pipeline, status, log)
        if status != "FINISHED":
            _show_links(pipeline, reporter)
        # A killed run has to end at once.
        if server is not None and status != "KILLED" and pipeline.prefect_flow_run_id:
            server.wait_for_events(pipeline.prefect_flow_run_id)
    raise_if_closed(pipeline)
    return pipeline.result(time.perf_counter() - began)


def _show_links(pipeline: Pipeline, reporter: Reporter) -> None:
    """Where to look at a run that did not finish."""
    from posttrain.pipelines.run.summary import links, opened_by

    pages = links(pipeline.result(0.0))
    for name, page in pages.items():
        reporter.say(f"{name:<14} {page}")
    if how := opened_by(pages, pipeline.home):
        reporter.say(how)


def _run_flow(pipeline: Pipeline, *, owns_process: bool) -> None:
    """Run the Prefect flow in this thread; SIGINT and SIGTERM both end in `KeyboardInterrupt`."""
    from prefect.exceptions import CancelledRun, TerminationSignal

    from posttrain.pipelines.rl.prefect_away import Body, call_flow
    from posttrain.pipelines.run.flow import flow_for

    flow, body = flow_for(pipeline.config.limits.max_parallel_stages), Body()
    shown = redacted_tree(pipeline.config.model_dump(mode="json"))
    with stop_on_signals(pipeline, owns_process=owns_process):
        try:
            arguments = (pipeline.title, shown, Live(pipeline), Live(body))
            call_flow(flow, body, *arguments, optional=False)
        except CancelledRun:
            if not pipeline.closed:
                raise
        except TerminationSignal as error:
            pipeline.stop_requested.set()
            raise KeyboardInterrupt from error
        except Exception as error:
            # An interrupt can strike inside a library that makes an error of its own of it.
            if pipeline.stop_requested.is_set() or follows_a_stop(error):
                raise KeyboardInterrupt from error
            raise


@contextmanager
def stop_on_signals(pipeline: Pipeline, *, owns_process: bool) -> Iterator[None]:
    """On SIGINT or SIGTERM tell stage threads to stop, and interrupt this (the main) thread.

    A second one ends the process if it is the run's own, and else interrupts again.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    first: list[float] = []

    def stop(number: int, frame: FrameType | None) -> None:
        # A terminal and a wrapper may both pass on one Ctrl-C.
        if owns_process and first and time.monotonic() - first[0] > SAME_STOP_S:
            print("stopped at once; the same command continues", file=sys.stderr, flush=True)
            os._exit(130)
        first.append(time.monotonic())
        pipeline.stop_requested.set()
        raise KeyboardInterrupt

    previous = {n: signal.signal(n, stop) for n in STOPS}
    try:
        with noted_stops() as came:
            pipeline.stop_came = came
            try:
                yield
            finally:
                pipeline.stop_came = never
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
