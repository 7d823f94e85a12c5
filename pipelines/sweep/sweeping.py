"""`run_sweep`: from a config with variants to one report, everything closed and on record."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from posttrain.core.analysis.report import Report, write_page
from posttrain.core.errors import ConfigError
from posttrain.core.runtime.reporter import Reporter
from posttrain.core.store import urls
from posttrain.core.store.artifacts import check_free_disk, make_folder
from posttrain.pipelines.run.store import require_folders
from posttrain.pipelines.run.summary import TRAINING_VIEW, UI_MLFLOW
from posttrain.pipelines.sweep.branches import Branch, Configs, Sweep, sweep_of
from posttrain.pipelines.sweep.driver import Driver
from posttrain.pipelines.sweep.places import Placement
from posttrain.pipelines.sweep.processes import Processes
from posttrain.pipelines.sweep.record import sweep_folder
from posttrain.pipelines.sweep.results import Measured, measured, report_of
from posttrain.pipelines.sweep.stopping import StopBehind

if TYPE_CHECKING:
    from posttrain.core.tracking.mlflow_tracker import PipelineTracker

MOST_PARALLEL = 256


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """What the command line adds to a config. `store` is a folder, of a URL its cache here.

    `parallel` is None for what `placed` makes of it; without `placed` branches run in processes of
    this machine.
    """

    home: Path
    store: Path
    parallel: int | None = None
    seeds: Sequence[int] | None = None
    only: Sequence[str] = ()
    stop_early: bool = False
    placed: Callable[[Sweep, SweepOptions], Placement] | None = None


@dataclass(frozen=True, slots=True)
class Swept:
    """A sweep that has ended: its report, the page in the home, and how many branches failed."""

    report: Report
    page: Path
    failed: int
    mlflow_run_id: str


def planned_sweep(
    configs: Configs, overrides: Sequence[str] | None, options: SweepOptions
) -> Sweep:
    """The sweep that would run, all variants checked; writes nothing."""
    if options.parallel is not None and not 1 <= options.parallel <= MOST_PARALLEL:
        raise ConfigError(
            f"--parallel is {options.parallel}, expected 1 to {MOST_PARALLEL} branches at once"
        )
    found = sweep_of(configs, overrides, seeds=options.seeds, only=options.only, home=options.home)
    require_folders(options.home, options.store)
    if found.section.search is not None:
        from posttrain.pipelines.sweep.search import require_optuna

        require_optuna()
    return found


def run_sweep(
    configs: Configs,
    overrides: Sequence[str] | None,
    options: SweepOptions,
    reporting: Callable[[], AbstractContextManager[Reporter]],
) -> Swept:
    """Run all branches of a config's variants, and report them.

    A branch that fails is in the report with its reason, and the others go on. The same call after
    an interruption goes on where it was. Raises `PosttrainError` before anything runs, and
    `KeyboardInterrupt` after all processes have ended.
    """
    began = time.perf_counter()
    sweep = planned_sweep(configs, overrides, options)
    for folder in (options.home, options.store):
        check_free_disk(folder, 0.0, sweep.loaded.config.limits.min_free_gb, "a sweep")
        make_folder(folder)
    judge = StopBehind(sweep.base, list(sweep.branches)) if options.stop_early else None
    driver = Driver(
        sweep,
        options.home,
        options.store,
        _name_of_store(options.store),
        _placement(sweep, options),
        judge=judge,
    )
    driver.start()
    status: Literal["FINISHED", "FAILED", "KILLED"] = "KILLED"
    tracker: PipelineTracker | None = None
    try:
        tracker = open_parent(sweep, options.home)
        driver.tags = {"mlflow.parentRunId": tracker.run_id}
        with reporting() as reporter:
            driver.reporter = reporter
            settings, branches = _run_all(driver, options)
        report = _report(driver, sweep, settings, branches, options, began, tracker)
        page = write_page(
            driver.folder / f"sweep-{datetime.now():%Y%m%d-%H%M%S}.html", report.html()
        )
        leave_report(tracker, report, page, driver, branches)
        failed = sum(driver.of(branch).status == "failed" for branch in branches)
        status = "FAILED" if failed else "FINISHED"
        return Swept(report, page, failed, tracker.run_id)
    finally:
        driver.close(interrupted=status == "KILLED")
        if tracker is not None:
            tracker.finish(status)


def _placement(sweep: Sweep, options: SweepOptions) -> Placement:
    """Where the branches run."""
    if options.placed is not None:
        return options.placed(sweep, options)
    folder = sweep_folder(options.home, sweep.name)
    return Processes(options.home, folder, options.parallel or 1)


def _run_all(
    driver: Driver, options: SweepOptions
) -> tuple[Mapping[str, Mapping[str, Any]], list[Branch]]:
    """Run what the config names; of a search, trial after trial."""
    sweep = driver.sweep
    driver.run(sweep.branches)
    settings, branches = dict(sweep.settings), list(sweep.branches)
    if sweep.section.search is not None:
        from posttrain.pipelines.sweep.search import run_search

        for name, values, found in run_search(driver, options.home, options.store):
            settings[name] = values
            branches += found
    return settings, branches


def _report(
    driver: Driver,
    sweep: Sweep,
    settings: Mapping[str, Mapping[str, Any]],
    branches: Sequence[Branch],
    options: SweepOptions,
    began: float,
    tracker: PipelineTracker,
) -> Report:
    results: list[Measured] = [
        measured(sweep, branch, driver.of(branch), options.home, options.store)
        for branch in branches
    ]
    runs = [one.record.run_id for one in results if one.record.run_id]
    links = {run: mlflow_page(tracker, run) for run in runs}
    wall = time.perf_counter() - began
    return report_of(sweep, settings, results, wall_s=wall, links=links)


def _name_of_store(store: Path) -> str:
    return urls.shown(store)


# --- MLflow --------------------------------------------------------------------------------------


def open_parent(sweep: Sweep, home: Path) -> PipelineTracker:
    """MLflow's run of the sweep, whose children are the variants' runs."""
    import yaml

    from posttrain.core.store.provenance import source_tags
    from posttrain.core.tracking.mlflow_store import prepare_database
    from posttrain.core.tracking.mlflow_tracker import PipelineTracker

    config = sweep.loaded.config.model_dump(mode="json")
    return PipelineTracker.start(
        uri=os.environ.get("MLFLOW_TRACKING_URI") or prepare_database(home),
        experiment=sweep.name,
        run_name=f"sweep {sweep.name}",
        config_yaml=yaml.safe_dump(config, sort_keys=False),
        params={
            "base": sweep.base,
            "measure": " ".join(sweep.measure),
            "seeds": list(sweep.seeds),
            "variants": list(sweep.settings),
        },
        tags={"posttrain.sweep": sweep.name, "posttrain.kind": "sweep"},
        source=source_tags(),
        journal=home / "runs",
    )


def mlflow_page(tracker: PipelineTracker, run_id: str) -> str:
    """MLflow's page of a run of this sweep."""
    from posttrain.core.redaction import address

    remote = tracker.uri.startswith(("http://", "https://"))
    base = address(tracker.uri).rstrip("/") if remote else UI_MLFLOW
    return f"{base}/#/experiments/{tracker.experiment_id}/runs/{run_id}?{TRAINING_VIEW}"


def leave_report(
    tracker: PipelineTracker,
    report: Report,
    page: Path,
    driver: Driver,
    branches: Sequence[Branch],
) -> None:
    """The page and the table on the sweep's run; runs of an earlier sweep become its children."""
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    tracker.log_file(page)
    tracker.set_tags({"mlflow.note.content": report.markdown()[:5000]})
    tracker.flush()
    client = MlflowClient(tracker.uri)
    for run_id in {driver.of(branch).run_id for branch in branches} - {""}:
        try:
            if client.get_run(run_id).data.tags.get("mlflow.parentRunId") != tracker.run_id:
                client.set_tag(run_id, "mlflow.parentRunId", tracker.run_id)
        except MlflowException:  # it was deleted there, or another server has it
            continue
