"""`verify`: a model, everything it comes from, and some of its steps, checked against the record.

Every check has one of three outcomes, and nothing that was not looked at is called equal.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

from posttrain.core.analysis.report import Report, listed, table
from posttrain.core.config.rl_stage import TRAINING_KINDS
from posttrain.core.errors import ConfigError, PosttrainError, ResourceError
from posttrain.core.runtime.reporter import Reporter
from posttrain.core.store.ancestry import Ancestor, Family, Made
from posttrain.core.store.artifacts import ArtifactStore
from posttrain.core.store.attestation import (
    Attestation,
    Check,
    Verification,
    attest,
    kept_at,
    read_attestation,
    rows,
)
from posttrain.core.store.identity import source_digest
from posttrain.core.store.manifests import ATTESTATION, file_digest, model_digest
from posttrain.core.store.provenance import environment
from posttrain.pipelines.analysis.past_run import PastRun, open_run
from posttrain.pipelines.analysis.replay_comparison import StepSource, find_steps
from posttrain.pipelines.analysis.verify_stage import (
    StageFiles,
    check_files,
    check_inputs,
    check_manifest,
    check_parts,
    judged,
    known_digests,
)
from posttrain.pipelines.analysis.verify_steps import (
    CLASSES,
    check_by_last_step,
    check_final_weights,
    check_record,
    recompute,
    rescore,
)
from posttrain.pipelines.run.model_reference import find_model, first_run, tracking_uri

DEFAULT_STEPS = 2


@dataclass(frozen=True, slots=True)
class Asked:
    """What to verify: `steps` of all training stages together, drawn by `seed`.

    `expected` is the start of the digest that the author of an attestation published.
    """

    model: str
    steps: int = DEFAULT_STEPS
    seed: int = 0
    expected: str = ""


@dataclass
class Verified:
    """What came out. `drawn` and `reached` are by stage."""

    model: str
    digest: str
    origin: str
    seed: int
    checks: list[Check] = field(default_factory=list)
    drawn: dict[str, list[int]] = field(default_factory=dict)
    reached: dict[str, str] = field(default_factory=dict)
    attestation: str = ""
    notes: list[str] = field(default_factory=list)

    def count(self, outcome: str) -> int:
        return sum(check.outcome == outcome for check in self.checks)

    @property
    def failed(self) -> bool:
        """Whether something differs, or nothing at all could be compared."""
        return self.count("differs") > 0 or self.count("equal") == 0

    def verdict(self) -> str:
        """One sentence; it never says more than was looked at."""
        differ, equal, left = map(self.count, ("differs", "equal", "not checked"))
        unchecked = f"; {left} not checked" if left else ""
        if differ:
            return f"NOT as recorded: {differ} of {differ + equal} checks differ{unchecked}"
        if not equal:
            return f"nothing could be checked ({left} checks)"
        return f"as recorded: {equal} checks are equal{unchecked}"

    def _drawn(self) -> list[str]:
        named = [f"{listed(steps)} of {name}" for name, steps in self.drawn.items()]
        return [f"steps drawn with --seed {self.seed}: {'; '.join(named)}"] if named else []

    def report(self) -> Report:
        """The table, and what `--json` prints."""
        cells = [
            {"what": c.what, "how": c.how, "result": c.outcome, "detail": c.detail}
            for c in self.checks
        ]
        classes = [f"{name}: steps are {CLASSES[at]} ({at})" for name, at in self.reached.items()]
        return Report(
            f"{self.model}: {self.origin}, digest {self.digest[:12]}",
            [*self.notes, *self._drawn(), *classes],
            [table("checks", cells)],
            {
                "model": self.model,
                "digest": self.digest,
                "verdict": self.verdict(),
                "equal": self.count("equal"),
                "differs": self.count("differs"),
                "not_checked": self.count("not checked"),
                "seed": self.seed,
                "steps": self.drawn,
                "reached": self.reached,
                "checks": rows(self.checks),
                "attestation": self.attestation,
            },
        )


@dataclass
class _Stage:
    """A stage of the past, with its run where this home has one."""

    files: StageFiles
    run: PastRun | None
    why: str = ""
    source: StepSource | None = None
    why_no_steps: str = ""


def verify(asked: Asked, home: Path, store: Path, reporter: Reporter) -> Verified:
    """Check the model and its past; the attestation goes to the home.

    Raises `ConfigError` for a text that names no model, `ResourceError` where nothing is recorded
    of it. Nothing of a run is changed.
    """
    folder = Path(asked.model).expanduser()
    statement = folder / ATTESTATION
    family = Family(store)
    exported = None
    if folder.is_dir() and statement.is_file() and family.by_folder(folder) is None:
        exported = read_attestation(statement)
    if exported is not None:
        checks = list(_check_exported(folder, exported, asked.expected))
        if not family.knows(exported.model.digest):
            return _without_home(asked, exported, checks)
        digest, origin = exported.model.digest, f"exported from stage '{exported.model.stage}'"
    else:
        if asked.expected:
            raise ConfigError(
                f"--expect is for an exported folder with {ATTESTATION}; leave it out"
            )
        found = find_model(asked.model, home, store, compare=False)
        digest, origin, checks = found.digest, found.origin, []
        if not family.knows(digest):
            raise ResourceError(
                f"'{asked.model}' cannot be verified: no stage of {store} made it and it has no "
                f"{ATTESTATION}; give the --home or --store of its run, or a folder that "
                "`posttrain export` wrote"
            )
    verified = Verified(asked.model, digest, origin, asked.seed, checks)
    _verify_past(verified, asked, family, home, store, reporter)
    if exported is not None:
        verified.notes += _said(exported)
        verified.checks += _against_statement(exported, attest(family, digest))
    _keep(verified, family, home)
    return verified


# --- with the store ------------------------------------------------------------------------------


def _verify_past(
    verified: Verified, asked: Asked, family: Family, home: Path, store: Path, reporter: Reporter
) -> None:
    past = family.past_of(verified.digest)
    verified.checks.append(_check_mlflow(past, home))
    stages = [_opened(made, home, store) for made in _stages(past)]
    known = known_digests([stage.files.made for stage in stages])
    for stage in stages:
        reporter.say(f"{stage.files.place}: files, inputs, settings, data, plugins, code")
        verified.checks += _by_digest(stage, known)
    steps = {s.files.made.stage: sorted(s.source.recorded) for s in stages if s.source is not None}
    verified.drawn = draw(steps, asked.steps, asked.seed)
    for stage in stages:
        found = list(_by_computing(stage, verified, reporter))
        again = {check.what for check in found}  # all weights instead of a block of each tensor
        verified.checks = [check for check in verified.checks if check.what not in again] + found


def _stages(past: Ancestor) -> list[Made]:
    """Those in the past, the model's own first, each once."""
    found = {one.made.identity: one.made for one in past.walk() if one.made is not None}
    return list(found.values())


def _opened(made: Made, home: Path, store: Path) -> _Stage:
    folder = ArtifactStore(store).fetched(made.stage, made.identity)
    files = StageFiles(made, folder)
    record = first_run(home, made)
    if record is None:
        return _Stage(files, None, "no run of this home had the stage: give the --home of its run")
    try:
        run = open_run(record.run_id, home, store, compare=False)
    except PosttrainError as error:
        return _Stage(files, None, f"the run's config cannot be used: {error}")
    stage = _Stage(files, run)
    if made.kind not in TRAINING_KINDS:
        stage.why_no_steps = f"a stage of kind {made.kind} records no steps"
        return stage
    try:
        stage.source = find_steps(run, made.stage)
    except PosttrainError as error:
        stage.why_no_steps = str(error)
    return stage


def _by_digest(stage: _Stage, known: Mapping[str, str]) -> Iterator[Check]:
    files = stage.files
    yield check_files(files)
    yield check_manifest(files)
    yield from check_inputs(files, stage.run, known)
    if stage.run is None:
        yield files.not_checked("settings, data, plugins, code", "recomputed identity", stage.why)
    else:
        yield from check_parts(files, stage.run)
    if stage.source is not None:
        yield check_record(files, stage.source)
        weights = check_final_weights(files, stage.source)
        if weights is not None:
            yield weights


def _by_computing(stage: _Stage, verified: Verified, reporter: Reporter) -> Iterator[Check]:
    files, name = stage.files, stage.files.made.stage
    drawn = verified.drawn.get(name, [])
    how = "steps computed again"
    if stage.run is None or stage.source is None:
        yield files.not_checked("steps", how, stage.why or stage.why_no_steps)
        return
    if not drawn:
        why = f"none of its {len(stage.source.recorded)} recorded steps was drawn (--steps)"
        yield files.not_checked("steps", how, why)
        return
    done = recompute(files, stage.run, drawn, reporter)
    if done.reached:
        verified.reached[name] = done.reached
    yield done.check
    last = check_by_last_step(files, stage.source, done)
    if last is not None:
        yield last
    yield from rescore(files, stage.run, drawn)


def draw(steps: Mapping[str, Sequence[int]], count: int, seed: int) -> dict[str, list[int]]:
    """`count` of the recorded steps of several stages, spread evenly, the first stages before
    others; all of them if there are no more.
    """
    drawn: dict[str, list[int]] = {name: [] for name in steps}
    pools = {}
    for name, numbers in steps.items():
        pools[name] = list(numbers)
        random.Random(f"verify|{seed}|{name}").shuffle(pools[name])
    while count > 0 and any(pools.values()):
        for name, pool in pools.items():
            if pool and count > 0:
                drawn[name].append(pool.pop())
                count -= 1
    return {name: sorted(numbers) for name, numbers in drawn.items() if numbers}


def _check_mlflow(past: Ancestor, home: Path) -> Check:
    """The digest that MLflow has of the model, which no file of the store holds."""
    what, how, uri = "model", "digest, with MLflow's record of it", tracking_uri(home)
    row = {} if past.made is None else past.made.artifacts[past.digest]
    model_id = row.get("mlflow_model_id", "")
    if uri is None or not model_id:
        return Check(what, how, "not checked", "this home has no MLflow record of the model")
    from mlflow.exceptions import MlflowException

    from posttrain.core.tracking import mlflow_store

    try:
        known = mlflow_store.connect(uri).get_logged_model(model_id).tags.get("posttrain.digest")
    except MlflowException:
        return Check(what, how, "not checked", f"MLflow at {uri} does not know model {model_id}")
    problems = [] if known == past.digest else [f"it is {past.digest[:12]}, MLflow has {known}"]
    return judged(what, how, problems)


def _keep(verified: Verified, family: Family, home: Path) -> None:
    """Write the attestation with what came out."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    machine = environment(device, torch.float32, "")
    wanted = ("python", "torch", "transformers", "processor", "device", "CPU threads")
    verification = Verification(
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        code=f"{version('posttrain')}+{source_digest()[:12]}",
        machine={name: machine[name] for name in wanted},
        seed=verified.seed,
        steps=verified.drawn,
        reached=verified.reached,
        checks=rows(verified.checks),
    )
    path = kept_at(home, verified.digest)
    statement = attest(family, verified.digest)
    statement.model_copy(update={"verification": verification}).write(path)
    verified.attestation = str(path)


# --- an exported folder --------------------------------------------------------------------------


def _check_exported(folder: Path, statement: Attestation, expected: str) -> Iterator[Check]:
    found = file_digest(folder / ATTESTATION)
    what, how = ATTESTATION, "sha256, with what its author published"
    if expected:
        wrong = (
            [] if found.startswith(expected.lower()) else [f"it is {found[:16]}, not {expected}"]
        )
        yield judged(what, how, wrong)
    else:
        why = f"it is not signed: compare {found[:16]} with what its author published (--expect)"
        yield Check(what, how, "not checked", why)
    present = {p.name for p in folder.iterdir() if p.is_file() and p.name != ATTESTATION}
    problems = [f"{name} is missing" for name in statement.files if name not in present]
    problems += [f"{name} was added" for name in sorted(present - statement.files.keys())]
    for name in sorted(present & statement.files.keys()):
        now = file_digest(folder / name)
        if now != statement.files[name]:
            problems.append(f"{name} was changed: {now[:12]}, was {statement.files[name][:12]}")
    how = f"sha256 of every file, with {ATTESTATION}"
    yield judged(f"exported folder: {len(statement.files)} files", how, problems)
    yield _check_attested_model(statement)
    yield judged("ancestry in the attestation", "inputs, with what stages made", _broken(statement))


def _check_attested_model(statement: Attestation) -> Check:
    """Whether the exported files are the model's: by the sum of their digests."""
    model, what = statement.model, "exported model"
    how = f"digests of its files, with digest {model.digest[:12]} of stage {model.stage}"
    problems = []
    if model_digest(model.files) != model.digest:
        problems.append("the attested digests of the model's files are not those of its digest")
    places = {Path(name).name: digest for name, digest in reversed(model.files.items())}
    shared = [name for name in statement.files if name in places]
    known = {*model.files.values()}
    problems += [f"{n} is not the model's" for n in shared if statement.files[n] not in known]
    why = (
        ""
        if any(name.endswith(".safetensors") for name in shared)
        else ("the files were converted (GGUF), so their digests are not the model's")
    )
    return judged(what, how, problems, why)


def _broken(statement: Attestation) -> list[str]:
    """Where the chain of the attested digests has a gap."""
    made = {digest for stage in statement.stages for digest in stage.artifacts}
    known = made | set(statement.outside.values())
    gaps = [
        f"stage {stage.stage} read {role} {digest[:12]}, which nothing in it made"
        for stage in statement.stages
        for role, digest in stage.inputs.items()
        if digest not in known
    ]
    own = [] if statement.model.digest in made else ["no stage in it made the model"]
    return own + gaps


def _without_home(asked: Asked, statement: Attestation, checks: list[Check]) -> Verified:
    """What of a downloaded folder can be known without the home that made it."""
    origin = f"exported from stage '{statement.model.stage}', whose home is not here"
    verified = Verified(asked.model, statement.model.digest, origin, asked.seed, checks)
    verified.notes += _said(statement)
    here = f"{version('posttrain')}+{source_digest()[:12]}"
    why = "the home or store that made the model is not here: give its --home"
    for stage in statement.stages:
        name, how = f"stage {stage.stage}", "with the installed posttrain"
        if stage.code:
            other = "" if stage.code == here else f"made by posttrain {stage.code}, this is {here}"
            verified.checks.append(judged(f"{name}: code", how, [], other))
        for what in ("files", "settings, data, plugins", "steps and rewards"):
            verified.checks.append(Check(f"{name}: {what}", "", "not checked", why))
    return verified


def _said(statement: Attestation) -> list[str]:
    """What its author says to have verified, which is not checked here."""
    made = statement.verification
    if made is None:
        return ["its author attached no verification"]
    return [
        f"its author attached a verification of {made.when} by posttrain {made.code}: "
        f"{made.counts()}; this is a claim until it is made again with the home"
    ]


def _against_statement(exported: Attestation, here: Attestation) -> list[Check]:
    """Whether the folder says of the past what the store says."""
    ours = {stage.stage: stage for stage in here.stages}
    problems = []
    for stage in exported.stages:
        mine = ours.get(stage.stage)
        if mine is None:
            problems.append(f"the store has no stage {stage.stage} in the model's past")
            continue
        fields = [n for n, v in stage.model_dump().items() if getattr(mine, n) != v]
        problems += [f"stage {stage.stage}: {name} differs" for name in fields]
    problems += ["the model differs"] if exported.model != here.model else []
    problems += ["what came from outside differs"] if exported.outside != here.outside else []
    return [judged("ancestry in the attestation", "with the store's manifests", problems)]
