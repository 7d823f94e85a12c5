"""The trials of a search: Optuna proposes settings, and ends what does not look good.

A trial is a variant, run with every seed. Its value is the measure's mean over the seeds. Finished
trials are in the sweep's record, from which the study is made again: a search that was interrupted
goes on with the trial it was at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.core.config.variants import SearchSection, Settings, SpaceSection
from posttrain.core.errors import PosttrainError, ResourceError
from posttrain.pipelines.sweep.branches import Branch, branches_of
from posttrain.pipelines.sweep.driver import Driver
from posttrain.pipelines.sweep.record import SweepRecord, TrialRecord, write_record
from posttrain.pipelines.sweep.results import measured

if TYPE_CHECKING:
    import optuna

WANTED = "posttrain[search]"


def require_optuna() -> None:
    """Raise `ResourceError` where Optuna is not installed."""
    try:
        import optuna  # noqa: F401 - asked for only here, as it is an extra
    except ImportError as error:
        raise ResourceError(
            f"variants.search needs Optuna, which is not installed: pip install '{WANTED}', or "
            "write a grid"
        ) from error


def run_search(
    driver: Driver, home: Path, store: Path
) -> Iterator[tuple[str, Settings, list[Branch]]]:
    """Run the trials that are still to do; yields each trial's name, settings and branches.

    Trials before this call are yielded too, the record being what they were.
    """
    require_optuna()
    sweep, section = driver.sweep, driver.sweep.section.search
    assert section is not None
    space = _distributions(section)
    trials = driver.record.trials = [
        trial for trial in driver.record.trials if is_in(trial.settings, section)
    ]
    study = _study(section, sweep.loaded.config.seed, trials)
    for number in range(section.trials):
        if number < len(trials):
            trial = trials[number]
        else:
            proposed = study.ask(space)
            trial = TrialRecord(settings=dict(proposed.params))
            trials.append(trial)
            write_record(driver.folder, driver.record)
        name = f"trial {number + 1}"
        arguments = (sweep.loaded, sweep.configs, sweep.overrides, name, trial.settings)
        try:
            branches = branches_of(*arguments, sweep.seeds, home)
        except PosttrainError as error:
            driver.reporter.warn(f"{name} is left out: {error}")
            trial.done = True
            _tell(study, trial, space, failed=True)
            continue
        if not trial.done:
            _run_trial(driver, study, trial, branches, home, store)
            _tell(study, trial, space, failed=trial.value is None and not trial.pruned)
            write_record(driver.folder, driver.record)
        yield name, trial.settings, branches


def _run_trial(
    driver: Driver,
    study: optuna.Study,
    trial: TrialRecord,
    branches: list[Branch],
    home: Path,
    store: Path,
) -> None:
    before, driver.judge = driver.judge, PruneTrial(study, trial)
    try:
        driver.run(branches)
    finally:
        driver.judge = before
    trial.pruned = any(driver.of(branch).status == "stopped" for branch in branches)
    results = [measured(driver.sweep, b, driver.of(b), home, store).value for b in branches]
    values = [value for value in results if value is not None]
    trial.value = sum(values) / len(values) if values else None
    trial.done = True


@dataclass
class PruneTrial:
    """The judge of a trial: what it reached at a step, against the trials before, by the pruner."""

    study: optuna.Study
    trial: TrialRecord
    seen_at: dict[int, list[float]] = field(default_factory=dict)

    def seen(self, record: SweepRecord, branch: Branch, stage: str, step: int) -> str:
        """Why the trial is stopped; empty if it goes on. Of several seeds the mean counts."""
        right = record.branches[branch.key].right[step]
        self.seen_at.setdefault(step, []).append(right.count("1") / len(right))
        values = self.seen_at[step]
        self.trial.curve[step] = sum(values) / len(values)
        return f"stopped at step {step} by the pruner" if self._prunes(step) else ""

    def _prunes(self, step: int) -> bool:
        from optuna.trial import TrialState, create_trial

        if step == 0:  # the model as it came in: nothing was tried yet
            return False
        curve = {at: value for at, value in self.trial.curve.items() if at <= step}
        running = create_trial(
            state=TrialState.RUNNING, params={}, distributions={}, intermediate_values=curve
        )
        running.number = len(self.study.trials)
        pruner: optuna.pruners.BasePruner = self.study.pruner
        return bool(pruner.prune(self.study, running))


def is_in(settings: Settings, section: SearchSection) -> bool:
    """Whether an earlier trial is one of this search, whose space may have been changed since."""
    if settings.keys() != section.space.keys():
        return False
    for path, space in section.space.items():
        value = settings[path]
        if space.choices:
            if value not in space.choices:
                return False
        elif space.low is None or space.high is None or not space.low <= value <= space.high:
            return False
    return True


def _distributions(section: SearchSection) -> dict[str, Any]:
    """Optuna's distribution of each setting."""
    return {path: _distribution(space) for path, space in section.space.items()}


def _distribution(space: SpaceSection) -> Any:  # Any: one of Optuna's classes
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    if space.choices:
        return CategoricalDistribution(space.choices)
    assert space.low is not None and space.high is not None
    if space.whole:
        return IntDistribution(int(space.low), int(space.high), log=space.log)
    return FloatDistribution(float(space.low), float(space.high), log=space.log)


def _study(section: SearchSection, seed: int, trials: list[TrialRecord]) -> optuna.Study:
    """A study that knows what was tried before."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # A seed for how many trials there were, so that a search that goes on does not repeat itself.
    begun = seed + len(trials)
    sampler: optuna.samplers.BaseSampler = (
        optuna.samplers.TPESampler(seed=begun)
        if section.sampler == "tpe"
        else optuna.samplers.RandomSampler(seed=begun)
    )
    pruners: dict[str, optuna.pruners.BasePruner] = {
        "median": optuna.pruners.MedianPruner(n_startup_trials=4),
        "halving": optuna.pruners.SuccessiveHalvingPruner(reduction_factor=3),
        "none": optuna.pruners.NopPruner(),
    }
    study = optuna.create_study(
        direction="maximize", sampler=sampler, pruner=pruners[section.pruner]
    )
    space = _distributions(section)
    for trial in trials:
        if trial.done:
            _tell(study, trial, space, failed=trial.value is None and not trial.pruned)
    return study


def _tell(study: optuna.Study, trial: TrialRecord, space: dict[str, Any], *, failed: bool) -> None:
    """Give the study a trial that has ended."""
    from optuna.trial import TrialState, create_trial

    state = TrialState.PRUNED if trial.pruned else TrialState.COMPLETE
    if failed:
        state = TrialState.FAIL
    study.add_trial(
        create_trial(
            state=state,
            value=trial.value if state == TrialState.COMPLETE else None,
            params=trial.settings,
            distributions=space,
            intermediate_values=dict(trial.curve),
        )
    )
