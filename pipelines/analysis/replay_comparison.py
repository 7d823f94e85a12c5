"""The record of a stage's steps, and what differs when a step is computed again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from posttrain.core.analysis.report import listed
from posttrain.core.errors import ConfigError, ResourceError, RunError
from posttrain.core.store.artifacts import Artifact
from posttrain.core.store.manifests import file_digest, read_manifest
from posttrain.core.store.run_record import require_own_steps
from posttrain.core.training.checkpoint import master_weights, starting_points, step_of
from posttrain.core.training.digests import Block
from posttrain.core.training.step_record import (
    CRITIC,
    FOLDER,
    POLICY,
    PRM,
    STEPS,
    StepRecord,
    StepTensors,
    read_record,
    record_of,
    values_path,
)
from posttrain.pipelines.analysis.past_run import PastRun
from posttrain.pipelines.stage.files import checkpoint_folder

Weights = Mapping[str, Tensor]
_PLACES = {POLICY: ".", CRITIC: "critic", PRM: "implicit_prm"}


@dataclass(frozen=True, slots=True)
class StepSource:
    """The record of a stage's steps. `result` is its finished folder, None while it is not done.

    `last_step` is the stage's last step, and `model` its saved result, if that holds the trained
    weights as they were.
    """

    stage: str
    folder: Path
    recorded: Mapping[int, StepRecord]
    checkpoints: Path
    result: Path | None
    last_step: int
    model: Path | None

    def is_unchanged(self) -> bool:
        """Whether the record is what the stage wrote; of an unfinished stage nothing is known."""
        manifest = None if self.result is None else read_manifest(self.result)
        if manifest is None:
            return True
        known = manifest["files"].get(f"{FOLDER}/{STEPS}")
        return bool(known == file_digest(self.folder / STEPS))

    def changed_inputs(self, inputs: Mapping[str, Artifact]) -> list[str]:
        """Roles whose artifact is not the one that the stage read."""
        manifest = None if self.result is None else read_manifest(self.result)
        parts = {} if manifest is None else manifest["parts"]
        known = {role: parts.get(f"input {role}", item.digest) for role, item in inputs.items()}
        return [role for role, item in inputs.items() if known[role] != item.digest]

    def check_step(self, step: int, every: int) -> None:
        """Raise unless `step` was recorded, saying which steps were and what to set for it."""
        if step in self.recorded:
            return
        known = sorted(self.recorded)
        if not 1 <= step <= known[-1]:
            raise ConfigError(
                f"--step {step}: stage '{self.stage}' of this run has recorded steps "
                f"{listed(known)}"
            )
        raise ResourceError(
            f"step {step} of stage '{self.stage}' cannot be replayed: it was not recorded "
            f"(keep.records was {every}). Of this run can be: {listed(known)}. To record it, run "
            "the config with --no-cache --set keep.records=1"
        )

    def weights_after(self, step: int, names: tuple[str, ...]) -> dict[str, Tensor]:
        """Of `names` (`policy/...`, `critic/...`, as the optimizers order them) those kept."""
        for folder in starting_points(self.checkpoints):
            if step_of(folder) == step:
                return _of_checkpoint(folder, names)
        if step == self.last_step and self.model is not None:
            saved = _tensors(self.model)
            known = {name: saved.get(name.removeprefix(f"{POLICY}/")) for name in names}
            return {name: value for name, value in known.items() if value is not None}
        return {}


def _tensors(path: Path) -> dict[str, Tensor]:
    """Of a file that a run wrote; raises `RunError` where it was damaged since."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"{path} cannot be read ({error}): it was changed after the run; compute the stage "
            "again with --no-cache"
        ) from error


def _of_checkpoint(folder: Path, names: tuple[str, ...]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for model, place in _PLACES.items():
        masters = master_weights(folder, place)
        own = [name for name in names if name.startswith(f"{model}/")]
        found |= {
            name: masters[str(number)] for number, name in enumerate(own) if str(number) in masters
        }
    return found


def find_steps(run: PastRun, stage: str) -> StepSource:
    """Where the stage's steps were recorded; raises `ResourceError` when they were not."""
    identity, config = run.identity(stage), run.resolved.config
    checkpoints = checkpoint_folder(run.home, stage, identity)
    result: Path | None = run.store.fetched(stage, identity)
    assert result is not None
    folder = result / FOLDER
    if read_manifest(result) is None:  # not done, or taken away
        result, folder = None, checkpoints / FOLDER
    recorded = read_record(folder)
    if not recorded:
        require_own_steps(run.home, run.record)
        raise ResourceError(
            f"no step of stage '{stage}' of this run can be replayed: none was recorded"
            + (
                f" ({folder / STEPS} is not there)"
                if config.keep.records
                else " (keep.records was 0)"
            )
            + "; run the config again with --no-cache --set keep.records=1"
        )
    section = config.stages[stage]
    all_recorded = len(recorded) == max(recorded)
    last = getattr(section, "steps", None) or (max(recorded) if all_recorded else 0)
    adapted = getattr(section, "lora", None) is not None  # and merged before it was saved
    model = None if result is None or adapted else result / section.makes / "model.safetensors"
    if model is not None and not model.is_file():
        model = None
    return StepSource(stage, folder, recorded, checkpoints, result, last, model)


# --- comparing -----------------------------------------------------------------------------------


class Reached(Exception):
    """The step that was asked for has been compared; nothing more needs computing."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor or metric of a step that is not what it was.

    `max_abs` is the largest absolute difference, None where the recorded values were not kept;
    `where` is the first place that differs; `note` says what else is to be known.
    """

    step: int
    name: str
    shape: tuple[int, ...]
    max_abs: float | None = None
    where: tuple[int, ...] | None = None
    note: str = ""

    def __str__(self) -> str:
        size = " x ".join(map(str, self.shape)) or "one number"
        parts = [f"step {self.step}: {self.name} ({size})"]
        if self.max_abs is not None:
            parts.append(f"max abs difference {self.max_abs:.6g}")
        if self.where is not None:
            parts.append(f"first at {list(self.where)}")
        return ", ".join([*parts, *([self.note] if self.note else [])])


@dataclass(frozen=True, slots=True)
class ComparedStep:
    """A step with how much of it was compared and what of that differs, in order of computing."""

    step: int
    tensors: int
    metrics: int
    differences: tuple[Difference, ...] = ()


@dataclass
class Comparison:
    """A `StepSink` that compares each recorded step up to `until`, then raises `Reached`.

    `folder` is the record's; `weights_of` gives the trained weights as they were kept after a step,
    as far as they were; `report` receives each step when it is compared.
    """

    folder: Path
    recorded: Mapping[int, StepRecord]
    until: int
    weights_of: Callable[[int, tuple[str, ...]], Weights]
    report: Callable[[ComparedStep], None]
    steps: list[ComparedStep] = field(default_factory=list)

    def wants(self, step: int) -> bool:
        """As in `StepSink`."""
        return step in self.recorded

    def put(self, step: int, tensors: StepTensors, metrics: Mapping[str, float]) -> None:
        """As in `StepSink`."""
        then, now = self.recorded[step], record_of(step, tensors, metrics)
        batch = self._batch(then, now, tensors.batch)
        weights = self._weights(then, now, tensors.weights)
        numbers = [
            Difference(step, f"metric {name}", (), abs(now.metrics[name] - value))
            for name, value in then.metrics.items()
            if name in now.metrics and now.metrics[name] != value
        ]
        compared = ComparedStep(
            step,
            len(now.batch) + len(now.weights),
            len(set(then.metrics) & set(now.metrics)),
            (*batch, *weights, *numbers),
        )
        self.steps.append(compared)
        self.report(compared)
        if step >= self.until:
            raise Reached

    def _batch(
        self, then: StepRecord, now: StepRecord, tensors: Mapping[str, Tensor]
    ) -> list[Difference]:
        names = [n for n in {**now.batch, **then.batch} if now.batch.get(n) != then.batch.get(n)]
        if not names:
            return []
        path = values_path(self.folder, then.step)
        values = _tensors(path) if path.is_file() else {}
        advice = "its values were not recorded (keep.values)"
        return [
            self._difference(then, name, tensors.get(name), values.get(name), advice)
            for name in names
        ]

    def _weights(
        self, then: StepRecord, now: StepRecord, tensors: Mapping[str, Tensor | Block]
    ) -> list[Difference]:
        """By digest of a block; of a step whose weights were kept, by all of their values."""
        kept = self.weights_of(then.step, tuple(tensors))
        found = []
        for name in {**now.weights, **then.weights}:
            same = now.weights.get(name) == then.weights.get(name)
            value, before = tensors.get(name), kept.get(name)
            if before is not None and isinstance(value, Tensor):
                same = same and torch.equal(value.detach().to(before.dtype).cpu(), before)
            if not same:
                advice = "its values after this step were not kept (keep.every)"
                found.append(self._difference(then, name, value, before, advice))
        return found

    @staticmethod
    def _difference(
        then: StepRecord, name: str, now: Tensor | Block | None, before: Tensor | None, advice: str
    ) -> Difference:
        """How far `now` is from `before`, as far as they are there."""
        recorded = tuple(then.shapes.get(name, ()))
        if now is None:
            return Difference(then.step, name, recorded, note="is not computed any more")
        shape = tuple(now.shape)
        if name not in then.shapes:
            return Difference(then.step, name, shape, note="was not recorded then")
        if recorded != shape:
            note = f"its shape was {' x '.join(map(str, recorded))}"
            return Difference(then.step, name, shape, note=note)
        if isinstance(now, Block):
            return Difference(then.step, name, shape, note="its values lie on several ranks")
        if before is None:
            return Difference(then.step, name, shape, note=advice)
        now = now.detach().to(before.dtype).cpu()
        gap = (now.double() - before.double()).abs()
        places = (now != before).nonzero()
        if not len(places):
            note = "the kept values are equal: the record was changed after the run"
            return Difference(then.step, name, shape, 0.0, note=note)
        first = tuple(int(i) for i in places[0])
        return Difference(then.step, name, shape, float(gap.max()), first)
