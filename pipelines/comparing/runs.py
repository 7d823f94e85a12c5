"""Whole runs side by side: grouped by experiment, with what the intervals show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

from posttrain.core.compare.configs import SAME_EXPERIMENT, differences, experiment
from posttrain.core.compare.curves import MAIN_METRICS, Point, mean_curve
from posttrain.core.compare.significance import AccuracyTest, group_tests
from posttrain.core.errors import ConfigError
from posttrain.pipelines.comparing.past_run import PastRun
from posttrain.pipelines.comparing.results import RunResults, read_results


@dataclass(frozen=True, slots=True)
class Group:
    """Runs that differ in nothing but the seed, names, and what was kept."""

    name: str
    runs: tuple[RunResults, ...]

    def curve(self, metric: str) -> list[Point]:
        """The metric by step, over the runs."""
        return mean_curve([run.series(metric) for run in self.runs])


@dataclass(slots=True)
class RunComparison:
    """Groups in the order given; `changed` are the keys of the configs that differ, by run."""

    groups: list[Group]
    changed: dict[str, list[str | None]]
    tests: list[AccuracyTest]
    notes: list[str] = field(default_factory=list)

    @property
    def runs(self) -> list[RunResults]:
        """All runs, group by group."""
        return [run for group in self.groups for run in group.runs]

    @property
    def metrics(self) -> list[str]:
        """The main metrics that some run has."""
        return [m for m in MAIN_METRICS if any(run.series(m) for run in self.runs)]


def compare_runs(runs: Sequence[PastRun], stage: str | None) -> RunComparison:
    """Two or more runs; raises `ConfigError` for one given twice, `ResourceError` without steps."""
    ids = [run.record.run_id for run in runs]
    twice = sorted({one for one in ids if ids.count(one) > 1})
    if twice:
        raise ConfigError(f"run {twice[0][:12]} is given twice; name each run once")
    results = [read_results(run, stage) for run in runs]
    groups = _groups(results)
    ordered = [run for group in groups for run in group.runs]
    tests = [test for a, b in combinations(groups, 2) for test in _tests(a, b)]
    notes = [note for run in ordered for note in run.notes]
    notes += _notes(groups, tests)
    return RunComparison(groups, differences([run.config for run in ordered]), tests, notes)


def _groups(results: Sequence[RunResults]) -> list[Group]:
    found: dict[str, list[RunResults]] = {}
    for run in results:
        found.setdefault(f"{run.stage} {experiment(run.config)}", []).append(run)
    return [
        Group(f"{chr(65 + i)}" if i < 26 else f"G{i + 1}", tuple(group))
        for i, group in enumerate(found.values())
    ]


def _tests(first: Group, second: Group) -> list[AccuracyTest]:
    measured = [
        [found for run in group.runs if (found := run.measured()) is not None]
        for group in (first, second)
    ]
    return group_tests(measured[0], measured[1], (first.name, second.name))


def _notes(groups: Sequence[Group], tests: Sequence[AccuracyTest]) -> list[str]:
    notes = []
    stages = sorted({run.stage for group in groups for run in group.runs})
    if len(stages) > 1:
        notes.append(f"the curves are of different stages: {', '.join(stages)}")
    if len(groups) == 1:
        notes.append(
            "all runs are of one experiment (they differ in no more than "
            f"{', '.join(SAME_EXPERIMENT)}), so there is no difference to test: the intervals are "
            "the spread over seeds"
        )
    elif not tests:
        notes.append("no two groups have held-out answers, so nothing was tested")
    for run in (run for group in groups for run in group.runs):
        if run.source != "journal":
            notes.append(
                f"run {run.label}: its metrics are from the {run.source}, which has neither times "
                "nor evaluations between steps (another home computed the stage)"
            )
    over_problems = [t for t in tests if t.how != "over seeds"]
    if over_problems:
        notes.append(
            "a test over problems tells these trained models apart; whether their configs differ "
            "takes two or more seeds of each"
        )
    if len(tests) > 1:
        notes.append(
            f"there are {len(tests)} tests, each with a 95 % interval of its own: of 20 such on "
            "models that do not differ one is expected to miss"
        )
    for group in groups:
        seeds = [run.seed for run in group.runs]
        if len(set(seeds)) < len(seeds):
            notes.append(
                f"group {group.name} has runs of the same seed: they are repetitions, and its "
                "interval over seeds is narrower than it would be"
            )
    return notes
