"""What `import posttrain` offers: `run`, `fork`, `sweep`, `validate`, `plan`, `load`, `compare`.

The commands of the same names call the same functions below. Importing this loads nothing heavy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.core.errors import ConfigError
from posttrain.core.redaction import redact_error
from posttrain.core.runtime.reporter import Reporter, SilentReporter
from posttrain.pipelines.api.host import as_guest, call
from posttrain.pipelines.run.checks import (
    check_inputs,
    default_home,
    folders,
    resolve_configs,
    shared_store,
)

if TYPE_CHECKING:
    from posttrain.core.analysis.report import Report
    from posttrain.core.config.resolve import ResolvedRun
    from posttrain.core.config.schema import RunConfig
    from posttrain.core.contracts import Plugin
    from posttrain.core.plugin_manager import PluginManager
    from posttrain.core.store.approval import Answer
    from posttrain.core.store.artifacts import RunResult
    from posttrain.pipelines.api.planned import Device, Plan
    from posttrain.pipelines.api.run import Run
    from posttrain.pipelines.api.validated import Validation
    from posttrain.pipelines.run.gates import Ask
    from posttrain.pipelines.run.prefect_server import OwnServer

    OneConfig = str | Path | Mapping[str, Any] | RunConfig  # Any: YAML values
    Config = OneConfig | Sequence[OneConfig]
    Overrides = Mapping[str, Any] | Sequence[str]
    Folder = str | Path | None


def run(
    config: Config,
    *,
    overrides: Overrides = (),
    home: Folder = None,
    store: Folder = None,
    fresh: bool = False,
    no_cache: bool = False,
    approve: Sequence[str] = (),
    reject: Sequence[str] = (),
    reason: str = "",
    plugins: Sequence[type[Plugin[Any]]] = (),
    progress: bool = True,
) -> Run:
    """Run the pipeline of a config and return what it left; stages computed before are reused.

    `config` is the path of a YAML file, the name of a shipped config, a mapping as the YAML would
    hold, or several of these, merged from left to right. `overrides` are `{"stages.rl.steps": 3}`
    or `["stages.rl.steps=3"]`. `home` is by default `$POSTTRAIN_HOME` or `.posttrain`, `store`
    `$POSTTRAIN_STORE` or the home's own: a folder or a URL
    such as `s3://bucket/prefix`. `plugins` are classes in addition to the installed ones.
    `fresh` starts again instead of continuing an interrupted run, `no_cache` computes every stage.
    `approve` and `reject` answer gates, by stage or `all`. The same call continues an interrupted
    run.

    Raises `PosttrainError`, whose message is what the command prints: `ConfigError`, `DataError`,
    `ResourceError`, `RunError`, `ApprovalNeeded` for a gate that nobody answered. Ctrl-C (in a
    notebook: interrupt) ends the run at the next safe point and raises `KeyboardInterrupt`.
    """
    from posttrain.pipelines.run.prefect_server import OwnServer

    places, stop = _places(home, store), threading.Event()
    configs, sets = as_configs(config), as_overrides(overrides)
    answers = given_answers(approve, reject, reason)

    def whole() -> tuple[RunResult, ResolvedRun, PluginManager]:
        server = OwnServer(places[0])
        try:
            return run_configs(
                configs,
                sets,
                *places,
                lambda: _reporting(progress=progress),
                server,
                plugins=plugins,
                fresh=fresh,
                no_cache=no_cache,
                answers=answers,
                stop=stop,
                owns_process=False,
            )
        finally:
            server.leave()

    try:
        with as_guest():
            result, resolved, manager = call(whole, stop)
    except Exception as error:  # its message and those behind it are shown by whoever calls
        redact_error(error)
        raise
    from posttrain.core.store.artifacts import ArtifactStore
    from posttrain.core.store.run_record import RunRecord, find_run
    from posttrain.pipelines.analysis.past_run import PastRun
    from posttrain.pipelines.api.run import Run

    folder = places[0] / "runs" / result.run_id
    record = RunRecord(result.run_id, resolved.config.name, folder)
    if result.run_id:
        record = find_run(places[0], result.run_id)
    return Run(PastRun(record, resolved, manager, places[0], ArtifactStore(places[1])), result)


def fork(
    of: Run | str,
    *,
    step: int | None = None,
    stage: str | None = None,
    overrides: Overrides = (),
    seed: int | None = None,
    home: Folder = None,
    store: Folder = None,
    plugins: Sequence[type[Plugin[Any]]] = (),
    progress: bool = True,
) -> Run:
    """A run that shares the first `step` steps of another one's stage and goes on from there.

    `of` is that run, or its id, of this home. `overrides` change its settings for what comes after
    the step; without any the fork ends in the same weights. Without `step` the run is forked before
    the `stage`. `seed` changes what is drawn after the step. Other arguments are those of `run`.

    Raises `ConfigError` for a change that cannot go on from those steps, and `ResourceError` where
    no checkpoint was kept.
    """
    from posttrain.pipelines.api.fork import make_fork

    name = of if isinstance(of, str) else of.id
    places, sets = _places(home, store), as_overrides(overrides)
    made = make_fork(name, places[0], step=step, stage=stage, overrides=sets, seed=seed)
    return run(
        made.config,
        overrides=sets,
        home=places[0],
        store=store,
        plugins=plugins,
        progress=progress,
    )


def validate(
    config: Config,
    *,
    overrides: Overrides = (),
    home: Folder = None,
    store: Folder = None,
    plugins: Sequence[type[Plugin[Any]]] = (),
) -> Validation:
    """Check a config, its plugins, its DAG, its model and its data; writes nothing.

    Arguments are those of `run`. Raises `PosttrainError` for what is wrong.
    """
    configs, sets, places = as_configs(config), as_overrides(overrides), _places(home, store)
    resolved, manager = resolve_configs(configs, sets, plugins)
    from posttrain.pipelines.api.validated import validated
    from posttrain.pipelines.sweep.branches import checked_variants

    with as_guest():
        found = validated(resolved, manager, *places)
        checked_variants(resolved, configs, sets, places[0], plugins)
        return found


def plan(
    config: Config,
    *,
    overrides: Overrides = (),
    home: Folder = None,
    store: Folder = None,
    plugins: Sequence[type[Plugin[Any]]] = (),
    device: Device | None = None,
    estimates: bool = True,
) -> Plan:
    """What `run` would do with each stage and why, with estimates of time, memory and disk.

    `estimates` measures this machine for up to 5 s, unless a `device` is named. Other arguments are
    those of `run`. Writes nothing.
    """
    resolved, manager = resolve_configs(as_configs(config), as_overrides(overrides), plugins)
    from posttrain.pipelines.api.planned import planned

    with as_guest():
        places = _places(home, store)
        return planned(resolved, manager, *places, device=device, estimates=estimates)


def sweep(
    config: Config,
    *,
    overrides: Overrides = (),
    home: Folder = None,
    store: Folder = None,
    parallel: int | None = None,
    seeds: Sequence[int] | None = None,
    only: Sequence[str] = (),
    stop_early: bool = False,
    work_pool: str | None = None,
    job_variables: Mapping[str, object] | None = None,
    ray: str | None = None,
    progress: bool = True,
) -> Report:
    """Run the variants of a config and compare them, as `posttrain sweep` does.

    `parallel` is the number of branches at once (None: one on this machine, all in a work pool, as
    many as fit on a cluster), `seeds` stand for those of the section `variants`, `only` names the
    variants to run next to the base; with `stop_early` one that falls behind the base is stopped.
    Branches run in processes of this machine, in the Prefect pool `work_pool`, whose jobs get
    `job_variables`, or on the nodes of the Ray cluster at `ray`. The report's `values` have a row
    for each variant and each run, failed ones with their reasons. Other arguments are those of
    `run`. The same call continues an interrupted sweep.
    """
    from posttrain.pipelines.deploy.placing import placed
    from posttrain.pipelines.sweep.sweeping import SweepOptions, run_sweep

    chosen = None if seeds is None else tuple(seeds)
    folders = _places(home, store)
    placing = placed(folders[0], work_pool, job_variables or {}, ray)
    options = SweepOptions(*folders, parallel, chosen, tuple(only), stop_early, placing)

    @contextmanager
    def shown() -> Iterator[Reporter]:
        with _reporting(progress=progress) as (reporter, _):
            yield reporter

    with as_guest():
        configs, sets = as_configs(config), as_overrides(overrides)
        return run_sweep(configs, sets, options, shown).report


def load(run: str, *, home: Folder = None, store: Folder = None) -> Run:
    """The run of this home whose id is, or begins with, `run`; raises `ConfigError` for no such.

    Plugins are not looked up, so that runs of plugins that are gone can be read.
    """
    from posttrain.pipelines.analysis.past_run import open_record
    from posttrain.pipelines.api.run import Run

    return Run(open_record(run, *_places(home, store)))


def compare(
    *runs: Run | str, stage: str | None = None, home: Folder = None, store: Folder = None
) -> Report:
    """Two or more runs side by side, as `posttrain compare RUN RUN` reports them.

    Runs that differ only in the seed are one group; held-out answers of groups are tested. The
    report has `notes`, `frames()` (its tables as DataFrames), `html()` and `markdown()`; a notebook
    shows its tables. `stage` is the trained stage whose curves are compared, where a run has
    several. Runs given by their ids are looked up in `home`.
    """
    if len(runs) < 2:
        raise ConfigError(
            f"compare was given {len(runs)} run(s): name two or more, as Run or by their ids"
        )
    from posttrain.pipelines.analysis.past_run import open_record
    from posttrain.pipelines.analysis.runs import compare_runs

    places = _places(home, store)
    past = [open_record(r, *places) if isinstance(r, str) else r._past for r in runs]
    return compare_runs(past, stage)


def run_configs(
    configs: Sequence[Path | Mapping[str, object]],
    overrides: Sequence[str] | None,
    home: Path,
    store: Path,
    reporting: Callable[[], AbstractContextManager[tuple[Reporter, Ask | None]]],
    server: OwnServer,
    *,
    plugins: Sequence[type[Plugin[Any]]] = (),
    fresh: bool = False,
    no_cache: bool = False,
    answers: Mapping[str, Answer] | None = None,
    stop: threading.Event | None = None,
    owns_process: bool = True,
) -> tuple[RunResult, ResolvedRun, PluginManager]:
    """From configs to a finished run: what the command and `run` have in common.

    `server` was begun first of all, as it starts while everything else is loaded. `reporting` gives
    what shows the progress and, if somebody is there, asks at a gate. Errors as of `execute`.
    """
    with server.unless_refused():
        resolved, manager = resolve_configs(configs, overrides, plugins)
        check_inputs(resolved, manager)
        from posttrain.pipelines.run.forks import check_forks  # it loads pydantic

        check_forks(resolved.config, home)
        from posttrain.pipelines.run.execute import RunOptions, execute

        with reporting() as (reporter, ask):
            options = RunOptions(
                home=home,
                store=store,
                fresh=fresh,
                no_cache=no_cache,
                answers=answers or {},
                ask=ask,
                server=server,
                stop=stop or threading.Event(),
                owns_process=owns_process,
            )
            return execute(resolved, manager, options, reporter), resolved, manager


def given_answers(
    approve: Sequence[str] | None, reject: Sequence[str] | None, reason: str
) -> dict[str, Answer]:
    """Answers to gates, by stage; raises `ConfigError` for both at once."""
    from posttrain.core.store.approval import Answer, this_person

    both = set(approve or ()) & set(reject or ())
    if both:
        raise ConfigError(f"--approve and --reject both name '{sorted(both)[0]}'; give one of them")
    if reason and not approve and not reject:
        raise ConfigError("--reason is the reason of an answer: add --approve STAGE")
    who = this_person()
    named = [(stage, True) for stage in approve or ()]
    named += [(stage, False) for stage in reject or ()]
    return {stage: Answer.now(approved, who, reason, "command line") for stage, approved in named}


def as_configs(config: Config) -> list[Path | Mapping[str, object]]:
    """Paths and mappings, in order; raises `ConfigError` for anything else."""
    if isinstance(config, str | Path | Mapping) or not isinstance(config, Sequence):
        return [_as_config(config)]
    return [_as_config(one) for one in config]


def _as_config(one: object) -> Path | Mapping[str, object]:
    if isinstance(one, str | Path):
        return Path(one)
    if isinstance(one, Mapping):
        return one
    from posttrain.core.config.schema import RunConfig

    if isinstance(one, RunConfig):
        return one.model_dump(mode="json")
    raise ConfigError(
        f"a config is a path, the name of a shipped config, a mapping or a RunConfig, got "
        f"{type(one).__name__}"
    )


def as_overrides(overrides: Overrides) -> list[str]:
    """The overrides as the command line has them; raises `ConfigError` for what JSON cannot hold.

    A value keeps its type: JSON's `1e-05` would be a text in YAML 1.1.
    """
    if isinstance(overrides, str):
        raise ConfigError(
            f"overrides are a mapping or a list, got the text {overrides!r}; write [{overrides!r}]"
        )
    if not isinstance(overrides, Mapping):
        return list(overrides)
    from posttrain.core.config.loading import override_of

    try:
        return [override_of(key, value) for key, value in overrides.items()]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"overrides: {error}; give numbers, texts, lists and mappings") from error


def _places(home: Folder, store: Folder) -> tuple[Path, Path]:
    """Home and store as absolute paths."""
    return folders(
        default_home() if home is None else Path(home),
        shared_store() if store is None else store,
    )


@contextmanager
def _reporting(*, progress: bool) -> Iterator[tuple[Reporter, Ask | None]]:
    """A table in a notebook, live bars on a terminal, plain lines elsewhere; or nothing."""
    if not progress:
        yield SilentReporter(), None
        return
    from posttrain.pipelines.api.notebook import NotebookReporter, in_notebook
    from posttrain.pipelines.run.progress import PlainReporter, RichReporter, make_reporter

    made: NotebookReporter | PlainReporter | RichReporter
    made = NotebookReporter() if in_notebook() else make_reporter(json=False, plain=False)
    with made as reporter:
        yield reporter, None
