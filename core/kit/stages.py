"""What stage kinds promise, in a basic run on made-up problems and a tiny model."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

from posttrain.core.contracts import CONTRACTS, StageEstimate, StageOutput
from posttrain.core.contracts.stage import ModelSize
from posttrain.core.kit.checks import Skipped, Subject, check, expect, expect_equal
from posttrain.core.kit.every import fields_of
from posttrain.core.types import Artifact, Problem, Split

NUMBERS = {"train": range(200), "held_out": range(1000, 1050)}


def _problems(split: Split, count: int) -> list[Problem]:
    numbers = list(NUMBERS[split])[:count]
    return [Problem(str(n), f"{n},", str(n + 1), str(n + 1)) for n in numbers]


class ScriptedRun:
    """A stage's surroundings that record what it reports: a `StageRun` without a run.

    Problems count on from a number. Inputs of kind `model` are a tiny random model, and those of
    kind `dataset` ten problems.
    """

    name, seed, max_model_len = "checked", 0, 128
    task: Any = None  # Any: stands for no task

    def __init__(self, folder: Path, reads: Mapping[str, str]) -> None:
        self.out, self.checkpoints = folder / "out", folder / "checkpoints"
        self.out.mkdir(parents=True)
        self.metrics: dict[str, float] = {}
        self.inputs = {role: self._input(role, kind, folder) for role, kind in reads.items()}

    def _input(self, role: str, kind: str, folder: Path) -> Artifact:
        path = folder / "inputs" / role
        path.mkdir(parents=True)
        if kind == "model":
            from posttrain.core.kit.tiny import make_tiny_model

            make_tiny_model(path)
        elif kind == "dataset":
            _write(path / "problems.json", _problems("train", 10))
        else:
            raise Skipped(f"it reads an artifact of kind '{kind}', which only a run has")
        return Artifact(kind, str(path), "0" * 64, role)

    @property
    def device(self) -> Any:  # Any: torch's own type, which is loaded late
        import torch

        return torch.device("cpu")

    @property
    def dtype(self) -> Any:  # Any: as `device`
        import torch

        return torch.float32

    def check(self) -> None:
        """Nobody asks it to stop."""

    def warn(self, text: str) -> None:
        """Nobody reads it."""

    say = warn

    def started(self, total_steps: int) -> None:
        """Nobody watches."""

    progress = started

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.metrics.update(metrics)

    def log_summary(self, metrics: Mapping[str, float]) -> None:
        self.metrics.update(metrics)

    def log_table(self, name: str, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        json.dumps(list(rows))

    def log_file(self, path: Path, folder: str = "") -> None:
        expect(path.exists(), f"it logs {path.name}, which does not exist")

    def set_tags(self, tags: Mapping[str, str]) -> None:
        expect(all(isinstance(value, str) for value in tags.values()), "a tag is not text")

    def problems(self, split: Split, count: int) -> list[Problem]:
        return _problems(split, count)

    def read_problems(self, role: str = "dataset") -> list[Problem]:
        expect(role in self.inputs, f"it reads the input '{role}', which it does not declare")
        rows = json.loads((self.inputs[role].path / "problems.json").read_text())
        return [Problem(*row) for row in rows]

    def write_problems(self, problems: Sequence[Problem]) -> Path:
        return _write(self.out / "dataset" / "problems.json", problems).parent

    def tokenizer_of(self, role: str = "model") -> Any:  # Any: a `StageTokenizer`
        from posttrain.core.data.tokens import ChatTokenizer

        return ChatTokenizer.load(self.inputs[role].path)

    @contextmanager
    def engine(self, role: str = "model") -> Any:  # Any: an iterator of an engine
        raise Skipped("it samples, which takes a run")
        yield

    def build(self, contract: type[Any], component: Any) -> Any:  # Any: as in `StageRun`
        raise Skipped("it builds another plugin, which takes a run")


def _write(path: Path, problems: Sequence[Problem]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [[p.key, p.prompt, p.answer, p.worked] for p in problems]
    path.write_text(json.dumps(rows))
    return path


@check("its config names only fields and plugin kinds that there are", "stage")
def _config(subject: Subject) -> None:
    config = subject.cls.Config
    strange = sorted(set(config.without_effect) - set(config.model_fields))
    expect(not strange, f"`without_effect` names {strange}, which are not fields of its Config")
    for place, kind, _ in _made(subject).components():
        expect(kind in CONTRACTS, f"the component at {place} is of an unknown kind '{kind}'")


def _made(subject: Subject) -> Any:  # Any: the config of a stage
    return subject.cls.Config.model_validate(fields_of(subject))


@check("it can be planned before it runs", "stage")
def _planned(subject: Subject) -> None:
    stage = subject.cls(_made(subject))
    expect(isinstance(stage.describe(), str), "`describe` gives no text")
    found = stage.estimate(ModelSize(parameters=1_000_000, disk_bytes=2e6))
    expect(found is None or isinstance(found, StageEstimate), "`estimate` gives another type")


@check("it makes what it says, and equal files each time", "stage")
def _run(subject: Subject) -> None:
    if subject.is_built_in:
        raise Skipped("it works inside a run only; its own tests have one")
    found = []
    for _ in range(2):
        with tempfile.TemporaryDirectory() as folder:
            found.append(_once(subject, Path(folder)))
    expect_equal(found[1], found[0], "files and metrics of a second run")


def _once(subject: Subject, folder: Path) -> tuple[dict[str, str], dict[str, float]]:
    """Digests of the files that a run makes, by path, and its metrics."""
    config = _made(subject)
    run = ScriptedRun(folder, config.reads)
    made = subject.cls(config).run(run)
    expect(isinstance(made, StageOutput), f"`run` gives {type(made).__name__}, not StageOutput")
    if not config.passes_on:
        expect(config.makes in made.made, f"it makes {sorted(made.made)}, not '{config.makes}'")
    for kind, path in made.made.items():
        inside = run.out in path.parents or any(i.path == path for i in run.inputs.values())
        expect(inside, f"the {kind} lies at {path}, not below `context.out`")
        expect(path.exists(), f"there is nothing at the path of the {kind}")
    metrics = {**run.metrics, **made.metrics}
    odd = [n for n, v in metrics.items() if not isinstance(v, int | float) or not isfinite(v)]
    expect(not odd, f"the metrics {sorted(odd)} are not finite numbers, as float is")
    files = (path for path in sorted(run.out.rglob("*")) if path.is_file())
    digest = {
        path.relative_to(run.out).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }
    return digest, metrics
