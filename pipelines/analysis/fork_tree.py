"""`fork --tree`: which runs of a home were forked from which, what was changed, what came of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from posttrain.core.analysis.fork_page import RunLine, fork_page, in_tree_order
from posttrain.core.analysis.report import Report, Row, table
from posttrain.core.config.fork_section import StepStage
from posttrain.core.config.loading import load_config
from posttrain.core.config.schema import RunConfig
from posttrain.core.errors import ConfigError, PosttrainError
from posttrain.core.store.artifacts import ArtifactStore, StageResult
from posttrain.core.store.identity import settings_changed
from posttrain.core.store.run_record import RunRecord, find_run, runs_of
from posttrain.core.tracking.journal import journal_path, read_journal
from posttrain.core.tracking.lineage import percent

_NOT_CHANGES = ("forked_from", "keep", "limits", "name", "description", "run_name", "plugin_files")
_LAST = {
    "reward/mean": "reward",
    "sft/loss": "loss",
    "loss/sft": "loss",
    "loss/preference": "loss",
    "rm/held_out_pair_accuracy": "pairs",
    "prm/held_out_step_accuracy": "steps",
}
"""What is shown of a trained stage: the first of these that it measured."""


def tree_report(home: Path, store: Path, run: str | None) -> Report:
    """The tree of the run whose id begins with `run`, or all trees of the home that have a fork.

    Raises `ConfigError` where there is none.
    """
    read = list(_read_all(home))
    lines = _lines(read, home, ArtifactStore(store))
    if run is not None:
        wanted = find_run(home, run).run_id
        top = _top(next((r.run_id for r, _, ids in read if wanted in ids), wanted), lines)
        chosen = [line for line in lines if _top(line.run, lines) == top]
    else:
        tops = {_top(line.run, lines) for line in lines if line.parent}
        chosen = [line for line in lines if _top(line.run, lines) in tops]
    if not chosen:
        raise ConfigError(
            f"no run in {home} was forked from another: `posttrain fork RUN --step N` makes one"
        )
    ordered = in_tree_order(chosen)
    forks = sum(bool(line.parent) for line in ordered)
    title = f"Forks: {len(ordered)} runs, {forks} of them forked"
    return Report(
        title,
        parts=[table("Runs and their forks", [_row(line) for line in ordered])],
        values={"runs": [asdict(line) for line in ordered]},
        page=fork_page(ordered, title),
    )


def _row(line: RunLine) -> Row:
    return {
        "run": line.run[:12],
        "forked from": line.parent[:12] or None,
        "at": (f"{line.stage}, step {line.step}" if line.step else line.stage) or None,
        "changed": ", ".join(line.changes) or None,
        "result": line.result,
        "status": line.status,
    }


def _top(run: str, lines: Sequence[RunLine]) -> str:
    """The run at the root of the tree of `run`."""
    parents = {line.run: line.parent for line in lines}
    seen = set()
    while (parent := parents.get(run, "")) and run not in seen:
        seen.add(run)
        run = parent
    return run


_Read = tuple[RunRecord, RunConfig, frozenset[str]]
"""Record and config of a run, and the ids of all attempts at it."""


def _read_all(home: Path) -> Iterator[_Read]:
    """The runs of a home; of attempts at one run, of which each goes on from the other, the last.

    Runs whose config cannot be read any more are left out.
    """
    alike: dict[str, list[RunRecord]] = {}
    for record in runs_of(home):
        if record.config.is_file():
            alike.setdefault(record.config.read_text("utf-8"), []).append(record)
    for records in alike.values():
        last = records[-1]
        try:
            config = load_config([last.config], []).config
        except PosttrainError:
            continue
        yield last, config, frozenset(record.run_id for record in records)


def _lines(read: Sequence[_Read], home: Path, store: ArtifactStore) -> list[RunLine]:
    last_of = {attempt: record.run_id for record, _, attempts in read for attempt in attempts}
    configs = {record.run_id: config for record, config, _ in read}
    found = []
    for record, config, _ in read:
        results = dict(_results(record, config, store))
        steps = {
            stage: _steps(home, stage, record, config)
            for stage, section in config.stages.items()
            if isinstance(section, StepStage)
        }
        done = len(results) == len(config.stages)
        line = RunLine(
            record.run_id,
            config.name,
            steps,
            result=_result(config, results),
            status="" if done else "not finished",
        )
        origin = config.forked_from
        if origin is not None:
            parent = last_of.get(origin.run, origin.run)
            known = configs.get(parent)
            changes = () if known is None else tuple(_changes(known, config))
            line = replace(
                line, parent=parent, stage=origin.stage, step=origin.step, changes=changes
            )
        found.append(line)
    return found


def _results(
    record: RunRecord, config: RunConfig, store: ArtifactStore
) -> Iterator[tuple[str, StageResult]]:
    for stage in config.stages:
        identity = record.stages.get(stage)
        made = None
        if identity is not None:
            made, _ = store.lookup(stage, identity, compare=False, fetch=False)
        if made is not None:
            yield stage, made


def _steps(home: Path, stage: str, record: RunRecord, config: RunConfig) -> int:
    """The steps that a stage took, as far as its journal has them, or is to take."""
    identity = record.stages.get(stage)
    if identity is not None:
        try:
            rows = read_journal(journal_path(home / "runs", stage, identity))
        except PosttrainError:
            rows = []
        if rows:
            return max(row.step for row in rows)
    steps = getattr(config.stages[stage], "steps", None)
    return steps if isinstance(steps, int) else 0


def _result(config: RunConfig, results: dict[str, StageResult]) -> str:
    """The last accuracy that was measured, and the reward or loss of the last steps."""
    parts = []
    for made in reversed(results.values()):
        if "eval/greedy_accuracy" in made.metrics and made.kind == "evaluate":
            bounds = ("eval/greedy_low", "eval/greedy_high")
            shown = percent(made.metrics, "eval/greedy_accuracy", *bounds)
            parts.append(f"accuracy {shown}")
            break
    for name, made in reversed(results.items()):
        if isinstance(config.stages[name], StepStage):
            parts += [f"{w} {made.metrics[k]:.3f}" for k, w in _LAST.items() if k in made.metrics]
            del parts[2:]
            break
    return " · ".join(parts)


def _changes(before: RunConfig, now: RunConfig) -> Iterator[str]:
    """Settings that differ from the parent's, as `rl.steps 50 -> 80`."""
    for change in settings_changed(before.model_dump(mode="json"), now.model_dump(mode="json")):
        head, _, rest = change.what.partition(".")
        fork = rest.partition(".")[2].split(".")
        if head in _NOT_CHANGES or (head == "stages" and fork[0] == "fork"):
            continue
        yield str(change).removeprefix("stages.")
    for stage in now.stages.values():
        own = stage.fork if isinstance(stage, StepStage) else None
        if own is not None and own.seed is not None:
            yield f"seed {own.seed} after the fork"
