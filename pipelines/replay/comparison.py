"""Compares steps that are computed again with what was recorded of them, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from posttrain.core.training.digests import Block
from posttrain.core.training.step_record import StepRecord, StepTensors, record_of, values_path

Weights = Mapping[str, Tensor]


class Reached(Exception):
    """The step that was asked for has been compared: there is nothing more to compute."""


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
        told = [f"step {self.step}: {self.name} ({size})"]
        if self.max_abs is not None:
            told.append(f"max abs difference {self.max_abs:.6g}")
        if self.where is not None:
            told.append(f"first at {list(self.where)}")
        return ", ".join([*told, *([self.note] if self.note else [])])


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
    as far as they were; `tell` is given each step when it is compared.
    """

    folder: Path
    recorded: Mapping[int, StepRecord]
    until: int
    weights_of: Callable[[int, tuple[str, ...]], Weights]
    tell: Callable[[ComparedStep], None]
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
        self.tell(compared)
        if step >= self.until:
            raise Reached

    def _batch(
        self, then: StepRecord, now: StepRecord, tensors: Mapping[str, Tensor]
    ) -> list[Difference]:
        names = [n for n in {**now.batch, **then.batch} if now.batch.get(n) != then.batch.get(n)]
        if not names:
            return []
        path = values_path(self.folder, then.step)
        values = load_file(path) if path.is_file() else {}
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
