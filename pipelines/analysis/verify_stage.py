"""`verify`, of one stage: its files, manifest, inputs, settings, data, plugins and code, by digest.

Nothing is computed again here; `verify_steps` does that.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.core.analysis.report import listed
from posttrain.core.config.base import BASE_MODEL
from posttrain.core.config.sft_stage import SftStage
from posttrain.core.contracts import Task
from posttrain.core.data.lengths import LengthRule
from posttrain.core.data.sft_rows import SourceReport, TokenRows, encoded_rows
from posttrain.core.errors import PosttrainError
from posttrain.core.models.source import directory_digest, known_folder
from posttrain.core.redaction import redacted
from posttrain.core.store.ancestry import Made
from posttrain.core.store.attestation import Check, Outcome
from posttrain.core.store.identity import identity_of
from posttrain.core.store.manifests import (
    digests_below,
    inside,
    model_digest,
    read_manifest,
    tree_digests,
)
from posttrain.core.training.step_record import FOLDER, changed_rows, problem_rows, read_rows
from posttrain.pipelines.analysis.past_run import PastRun
from posttrain.pipelines.run.assembly import PLUGINS
from posttrain.pipelines.run.planning import parts_of_stage

SHOWN = 4
_GROUPS = ("settings", "data", "plugins", "code")
_ASKED_ELSEWHERE = ("input ", "mlflow")


@dataclass(frozen=True, slots=True)
class StageFiles:
    """A finished stage on this disk; `place` begins the name of each of its checks."""

    made: Made
    folder: Path

    @property
    def place(self) -> str:
        return f"stage {self.made.stage}"

    def check(self, what: str, how: str, problems: list[str], unknown: str = "") -> Check:
        """Equal without `problems`; not checked where something was `unknown` and nothing differs.

        The first few problems are the detail.
        """
        return judged(f"{self.place}: {what}", how, problems, unknown)

    def not_checked(self, what: str, how: str, why: str) -> Check:
        return Check(f"{self.place}: {what}", how, "not checked", why)


def judged(what: str, how: str, problems: list[str], unknown: str = "") -> Check:
    """As of `StageFiles.check`, of anything."""
    outcome: Outcome = "differs" if problems else "not checked" if unknown else "equal"
    more = len(problems) - SHOWN
    detail = "; ".join(problems[:SHOWN]) + (f"; and {more} more" if more > 0 else "")
    return Check(what, how, outcome, detail or unknown)


def check_files(stage: StageFiles) -> Check:
    """Every file of the stage's folder against the manifest."""
    how, problems = "sha256 of every file, with the manifest", list[str]()
    manifest = read_manifest(stage.folder)
    if manifest is None:
        return stage.check("files", how, [f"{stage.folder}/manifest.json is not what was written"])
    wanted: Mapping[str, str] = manifest["files"]
    try:
        inside(stage.folder, ".")
    except ValueError as error:
        problems.append(str(error))
    found = tree_digests(stage.folder)
    for name in sorted({*wanted, *found}):
        if name not in found:
            problems.append(f"{name} is missing")
        elif name not in wanted:
            problems.append(f"{name} was added after the stage")
        elif wanted[name] != found[name]:
            problems.append(f"{name} was changed: {found[name][:12]}, was {wanted[name][:12]}")
    return stage.check(f"{len(wanted)} files", how, problems)


def check_manifest(stage: StageFiles) -> Check:
    """Whether the manifest agrees with itself: identity with its parts, results with files."""
    made, problems = stage.made, list[str]()
    if identity_of(made.parts) != made.identity:
        problems.append("the identity is not the hash of the parts that the manifest lists")
    if stage.folder.name != f"{made.stage}-{made.identity[:16]}":
        problems.append(f"the folder {stage.folder.name} is not named after the identity")
    manifest = read_manifest(stage.folder)
    files: Mapping[str, str] = {} if manifest is None else manifest["files"]
    for digest, row in made.artifacts.items():
        if model_digest(digests_below(files, row["uri"])) != digest:
            problems.append(f"the digest of the {row['kind']} is not that of its files")
    return stage.check("manifest", "hash of its parts and files", problems)


def check_inputs(
    stage: StageFiles, run: PastRun | None, known: Mapping[str, str]
) -> Iterator[Check]:
    """What it read: by digest something that a stage of the store made, or the base model.

    `known` maps digests to the stages that made them.
    """
    for role, digest in stage.made.inputs.items():
        if digest in known:
            yield stage.check(f"input {role}", f"digest, with stage {known[digest]}", [])
            continue
        sources = {} if run is None else run.resolved.config.stages[stage.made.stage].inputs
        if run is None or role not in sources:
            yield stage.not_checked(
                f"input {role}", "digest", "what it was is in no run record of this home"
            )
        elif sources[role] == BASE_MODEL:
            yield _check_base(stage, role, digest, run)
        else:
            problem = (
                f"it read {digest[:12]}, which no stage of the store made: what '{sources[role]}' "
                "made has another digest now"
            )
            yield stage.check(f"input {role}", f"digest, with stage {sources[role]}", [problem])


def _check_base(stage: StageFiles, role: str, digest: str, run: PastRun) -> Check:
    section = run.resolved.config.model
    what, how = f"input {role}", f"digest of the base model {section.source}"
    folder = known_folder(section, run.home / "models")
    if folder is None:
        return stage.not_checked(what, how, "the base model is not on this disk")
    found = directory_digest(folder)
    problems = [] if found == digest else [f"{folder} is {found[:12]}, {digest[:12]} was read"]
    return stage.check(what, how, problems)


# --- settings, data, plugins, code ---------------------------------------------------------------


def check_parts(stage: StageFiles, run: PastRun) -> Iterator[Check]:
    """The parts of the identity, from config, data and code as they are now, with the recorded."""
    made, how = stage.made, "recomputed part of the identity"
    config = run.resolved.config
    try:
        task: Task[Any] = run.manager.task(config.task)
        engine = json.loads(made.parts.get("engine", '""'))
        now = parts_of_stage(run.resolved, made.stage, made.inputs, engine, task.fingerprint())
    except PosttrainError as error:
        for group in _GROUPS:
            yield stage.not_checked(group, how, str(error))
        return
    then = dict(made.parts)
    if config.model.dtype == "auto":  # what that is depends on the machine
        then.pop("model.dtype", None)
        now.pop("model.dtype", None)
    names = [n for n in {**then, **now} if not n.startswith(_ASKED_ELSEWHERE)]
    for group in _GROUPS:
        own = [name for name in names if _group(name) == group]
        if not own:
            continue
        problems = [_changed(n, then.get(n), now.get(n)) for n in own if then.get(n) != now.get(n)]
        if group == "plugins":
            problems += changed_lines(run)
        if group == "data" and problems:
            problems += [f"it is read from {task.source()}"]
        yield stage.check(f"{group} ({len(own)})", how, problems)
    yield from _check_rows(stage, run, task)


def _group(part: str) -> str:
    if part == "posttrain":
        return "code"
    if part.startswith("plugin "):
        return "plugins"
    return "data" if part == "task_data" or part.startswith("file ") else "settings"


def _changed(name: str, then: str | None, now: str | None) -> str:
    if name == "task_data":
        return f"the task's data changed: {(now or '')[:12]}, was {(then or '')[:12]}"
    if name.startswith("file "):
        return f"the content of {name.removeprefix('file ')} changed"
    if name.startswith("plugin "):
        kind, _, plugin = name.removeprefix("plugin ").partition(" ")
        return f"{kind} plugin {plugin} changed: {now or 'absent'}, was {then or 'absent'}"
    if name == "posttrain":
        return f"made by posttrain {then}, this is {now}"
    return f"{name}: {now or 'absent'}, was {then or 'absent'}"


def changed_lines(run: PastRun) -> list[str]:
    """Lines of the run's copies of plugin files that differ from the copies in MLflow's folder."""
    found = []
    here = run.record.folder / PLUGINS
    for there in (run.home / "mlflow").glob(f"artifacts/*/{run.record.run_id}/artifacts/{PLUGINS}"):
        for other in sorted(path for path in there.rglob("*.py") if path.is_file()):
            name = other.relative_to(there)
            if not (here / name).is_file():
                found.append(f"{here / name} is missing")
                continue
            old = other.read_text("utf-8", errors="replace").splitlines()
            new = redacted((here / name).read_text("utf-8", errors="replace")).splitlines()
            line = _first_line(old, new)
            if line is not None:
                found.append(f"{here / name}:{line[0]} is {line[2]!r}, was {line[1]!r}")
    return found


def _first_line(old: list[str], new: list[str]) -> tuple[int, str, str] | None:
    """The first line that differs, by its number in `new`: the old text and the new one."""
    for tag, i, j, k, m in difflib.SequenceMatcher(a=old, b=new, autojunk=False).get_opcodes():
        if tag != "equal":
            before = old[i].strip() if i < j else ""
            return k + 1, before, new[k].strip() if k < m else ""
    return None


# --- rows of data --------------------------------------------------------------------------------


def _check_rows(stage: StageFiles, run: PastRun, task: Task[Any]) -> Iterator[Check]:
    """Each row of data that the stage trained on, read again."""
    then = read_rows(stage.folder / FOLDER)
    if not then:
        return
    what, how = f"{len(then)} rows of data", "read again, digest of each"
    try:
        now = dict(_rows_now(stage.made.stage, run, task))
    except PosttrainError as error:
        yield stage.not_checked(what, how, str(error))
        return
    changed = changed_rows(then, now.items())
    problems = [f"row {place} {'changed' if place in now else 'is gone'}" for place in changed]
    yield stage.check(what, how, problems)


def _rows_now(name: str, run: PastRun, task: Task[Any]) -> Iterator[tuple[str, str]]:
    config = run.resolved.config
    stage = config.stages[name]
    if isinstance(stage, SftStage) and stage.data is not None:
        yield from _sft_rows(name, stage, run)
        return
    available = task.available("train")
    if available is not None:
        yield from problem_rows(task.problems("train", available, config.seed))


def _sft_rows(name: str, stage: SftStage, run: PastRun) -> Iterator[tuple[str, str]]:
    """The rows of the stage's files as tokens, as the stage digests them."""
    import tempfile

    tokenizer = run.stage_inputs(name, run.resolved, run.inputs(name)).tokenizer()
    rule = LengthRule.of(run.resolved.config.model, "rows")
    with tempfile.TemporaryDirectory(prefix="posttrain-verify-") as folder:
        rows = TokenRows(Path(folder) / "rows")
        for source in stage.data or ():
            report, setting = SourceReport(source.path), f"stages.{name}.data"
            for example, row in encoded_rows(report, setting, tokenizer, stage.loss_on, rule):
                number = rows.add(row, example.where, "")
                yield example.where, rows.content(number).hex()


def known_digests(stages: list[Made]) -> dict[str, str]:
    """The stage that made each digest."""
    return {digest: made.stage for made in stages for digest in made.artifacts}


def shown_steps(steps: list[int]) -> str:
    return f"step{'s' if len(steps) != 1 else ''} {listed(steps)}"
