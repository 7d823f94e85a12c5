"""What a step computed, in few bytes, to compare a replay with.

`steps.jsonl` has a line for each recorded step with a digest per tensor, in the order in which they
are computed, and its metrics; lines before them say which program and machine took the steps that
follow. `values/` has the tensors of the batch themselves, if they are kept. A stage's artifact
keeps the folder as `replay/`. `rows.jsonl` has a digest for each row of data that the stage read.

Only what the record reads is sent: 64 KiB of each weight, not the model.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from pydantic import BaseModel, ConfigDict
from safetensors.torch import save_file
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.data.preference import LabelledAnswer, Pair
from posttrain.core.data.problems import problem_content
from posttrain.core.data.steps import StepRow
from posttrain.core.errors import ResourceError, RunError
from posttrain.core.runtime.files import of_shape, write_text
from posttrain.core.tracking.metric_names import find_metric
from posttrain.core.training.digests import Block, block_bounds, block_digests, tensor_digest
from posttrain.core.training.ranks import Ranks
from posttrain.core.types import Problem

if TYPE_CHECKING:  # a run that reuses every stage does not load the optimizer
    from posttrain.core.training.optim import StoredOptimizer

FOLDER = "replay"
"""Of the record in a stage's artifact, and among its checkpoints while it runs."""
STEPS = "steps.jsonl"
VALUES = "values"
ROWS = "rows.jsonl"
_ROW_DIGITS = 16
_MEASURED = {"s", "ms", "GB", "1/s", "tokens/s"}


@dataclass(frozen=True, slots=True)
class StepTensors:
    """The tensors of one step in the order they are computed: of the batch, then trained weights.

    Names of weights begin with their model's, as `policy/model.norm.weight`. Of weights that lie on
    several ranks there are only the blocks whose digests are recorded.
    """

    batch: Mapping[str, Tensor]
    weights: Mapping[str, Tensor | Block]


class StepSink(Protocol):
    """Is given each step: to be recorded, or to be compared with what was."""

    def wants(self, step: int) -> bool:
        """Whether this step is looked at."""

    def put(self, step: int, tensors: StepTensors, metrics: Mapping[str, float]) -> None:
        """One step, as it ended."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What is known of a step; `environment` is of the process that took it."""

    step: int
    batch: Mapping[str, str]
    weights: Mapping[str, str]
    shapes: Mapping[str, list[int]]
    metrics: Mapping[str, float]
    environment: Mapping[str, str] = field(default_factory=dict)


def record_of(step: int, tensors: StepTensors, metrics: Mapping[str, float]) -> StepRecord:
    """Digests of the step's tensors, and those of its metrics that the same step gives again."""
    both: dict[str, Tensor | Block] = {**tensors.batch, **tensors.weights}
    return StepRecord(
        step=step,
        batch={name: tensor_digest(tensor) for name, tensor in tensors.batch.items()},
        weights=block_digests(tensors.weights, step),
        shapes={name: list(tensor.shape) for name, tensor in both.items()},
        metrics={k: v for k, v in metrics.items() if is_reproducible(k, v)},
    )


def is_reproducible(name: str, value: float) -> bool:
    """Whether a metric is computed, not measured: no time, memory or rate, and no evaluation.

    Nor an alarm, since some compare with evaluations, which a replay leaves out.
    """
    known = find_metric(name)
    measured = known is None or known.unit in _MEASURED
    return not measured and not name.startswith(("eval/", "alarm/")) and not math.isnan(value)


class StepRecorder:
    """Appends to the record in `folder`; each line reaches the operating system at once."""

    def __init__(
        self,
        folder: Path,
        *,
        every: int,
        values: bool,
        environment: Mapping[str, str],
        keep_through: int,
    ) -> None:
        """Keeps what is there of steps up to `keep_through`; 0 begins again."""
        self.folder, self.every, self.values = folder, every, values
        kept = read_record(folder) if keep_through else {}
        try:
            if not keep_through:
                shutil.rmtree(folder, ignore_errors=True)
            (folder / VALUES).mkdir(parents=True, exist_ok=True)
            lines: list[str] = []
            now: Mapping[str, str] = {}
            for record in (kept[step] for step in sorted(kept) if step <= keep_through):
                if record.environment != now:
                    now = record.environment
                    lines.append(_environment_line(now))
                lines.append(_line(record))
            if dict(environment) != now:
                lines.append(_environment_line(environment))
            write_text(folder / STEPS, "".join(lines))
        except OSError as error:
            raise _cannot_write(folder, error) from error

    def wants(self, step: int) -> bool:
        return step % self.every == 0

    def put(self, step: int, tensors: StepTensors, metrics: Mapping[str, float]) -> None:
        line = _line(record_of(step, tensors, metrics))
        try:
            if self.values and tensors.batch:
                batch = {name: t.detach().cpu().contiguous() for name, t in tensors.batch.items()}
                save_file(batch, values_path(self.folder, step))
            with (self.folder / STEPS).open("a") as stream:
                stream.write(line)
        except OSError as error:
            raise _cannot_write(self.folder, error) from error

    def rows(self, rows: Iterable[tuple[str, str]]) -> None:
        """Note (place, sha256) of data rows that the stage reads; a row of one place counts once.

        A stage that goes on reads them again: what is known is not written twice.
        """
        known = read_rows(self.folder)
        fresh = {place: digest[:_ROW_DIGITS] for place, digest in rows if place not in known}
        lines = [json.dumps({"row": place, "sha256": digest}) for place, digest in fresh.items()]
        try:
            with (self.folder / ROWS).open("a", encoding="utf-8") as stream:
                stream.writelines(f"{line}\n" for line in lines)
        except OSError as error:
            raise _cannot_write(self.folder, error) from error


def problem_rows(problems: Iterable[Problem]) -> Iterator[tuple[str, str]]:
    """Where each problem stands, else its key, and the digest of its content."""
    for problem in problems:
        content = json.dumps(problem_content(problem)).encode("utf-8", "surrogatepass")
        place = problem.metadata.get("source", problem.key)
        yield place, hashlib.sha256(content).hexdigest()


def changed_rows(then: Mapping[str, str], now: Iterable[tuple[str, str]]) -> list[str]:
    """Places of rows that were read `then` and are not there `now`, or have another content."""
    here = {place: digest[:_ROW_DIGITS] for place, digest in now}
    return [place for place, digest in then.items() if here.get(place) != digest]


def read_rows(folder: Path) -> dict[str, str]:
    """The start of the digest of each row that the stage read, by its place; none of old runs."""
    path, found = folder / ROWS, {}
    for line in path.read_text("utf-8").splitlines() if path.is_file() else ():
        try:
            row = of_shape(json.loads(line), dict[str, str])
            found[row["row"]] = row["sha256"]
        except (ValueError, KeyError, RecursionError):
            continue  # a kill cut it short
    return found


def values_path(folder: Path, step: int) -> Path:
    return folder / VALUES / f"step-{step:06d}.safetensors"


class _EnvironmentRow(BaseModel):
    model_config = ConfigDict(extra="forbid")

    environment: dict[str, str]


class _StepRow(BaseModel):
    model_config = ConfigDict(extra="forbid")

    step: int
    batch: dict[str, str]
    weights: dict[str, str]
    shapes: dict[str, list[int]]
    metrics: dict[str, float]


def read_record(folder: Path) -> dict[int, StepRecord]:
    """The recorded steps, by number; a last line that a kill cut short is none."""
    path = folder / STEPS
    found: dict[int, StepRecord] = {}
    environment: Mapping[str, str] = {}
    lines = path.read_text(errors="replace").splitlines(keepends=True) if path.is_file() else []
    for number, line in enumerate(lines, start=1):
        if not line.endswith("\n"):
            break
        try:
            row = json.loads(line)
            if isinstance(row, dict) and "environment" in row:
                environment = of_shape(row, _EnvironmentRow)["environment"]
                continue
            record = StepRecord(**of_shape(row, _StepRow), environment=environment)
        except (ValueError, RecursionError) as error:
            raise RunError(
                f"{path}:{number}: this is not a record of a step ({error}): it was changed after "
                "the run; compute the stage again with --no-cache"
            ) from error
        found[record.step] = record
    return found


def _line(record: StepRecord) -> str:
    row = {
        "step": record.step,
        "batch": dict(record.batch),
        "weights": dict(record.weights),
        "shapes": dict(record.shapes),
        "metrics": dict(record.metrics),
    }
    return json.dumps(row, separators=(",", ":")) + "\n"


def _environment_line(environment: Mapping[str, str]) -> str:
    return json.dumps({"environment": dict(environment)}) + "\n"


def _cannot_write(folder: Path, error: OSError) -> ResourceError:
    return ResourceError(
        f"cannot record steps in {folder}: {error.strerror}; free some space, choose another "
        "--home, or set keep.records: 0"
    )


POLICY, CRITIC, PRM = "policy", "critic", "implicit_prm"
_COLUMNS = (
    "prompt_ids",
    "response_ids",
    "response_mask",
    "rollout_logprobs",
    "policy_version",
    "rewards",
    "mask",
    "advantages",
)


def rollout_tensors(batch: RolloutBatch | None) -> dict[str, Tensor]:
    """Of a rollout: what was sampled, what it was worth, what was made of that."""
    if batch is None:
        return {}
    return {name: batch.column(name) for name in _COLUMNS if name in batch.columns()}


def example_tensors(batch: RolloutBatch) -> dict[str, Tensor]:
    return {name: batch.column(name) for name in ("prompt_ids", "response_ids", "mask")}


def preference_tensors(rows: Sequence[Pair | LabelledAnswer]) -> dict[str, Tensor]:
    """Of pairs or labelled answers: all their tokens in a row, and each row's number of them."""
    ids = [list(chain(*_ids(row))) for row in rows]
    return {
        "token_ids": torch.tensor(list(chain(*ids)), dtype=torch.int64),
        "lengths": torch.tensor([len(row) for row in ids], dtype=torch.int64),
    }


def _ids(row: Pair | LabelledAnswer) -> list[tuple[int, ...]]:
    names = (name for name in type(row).__dataclass_fields__ if name.endswith("_ids"))
    return [getattr(row, name) for name in names]


def step_row_tensors(rows: Sequence[StepRow]) -> dict[str, Tensor]:
    """Of answers with labelled steps: all tokens in a row, each row's number of them, labels."""
    ids = [[*row.prompt_ids, *row.response_ids] for row in rows]
    return {
        "token_ids": torch.tensor(list(chain(*ids)), dtype=torch.int64),
        "lengths": torch.tensor([len(row) for row in ids], dtype=torch.int64),
        "labels": torch.tensor(list(chain(*(row.labels for row in rows))), dtype=torch.float64),
    }


def weight_tensors(trained: Mapping[str, StoredOptimizer], step: int) -> dict[str, Tensor | Block]:
    """Trained weights by name, after that of what they are of: `POLICY`, `CRITIC`, `PRM`."""
    return {
        f"{of}/{name}": tensor
        for of, stored in trained.items()
        for name, tensor in stored.weights(step).items()
    }


def gather_blocks(tensors: Mapping[str, Tensor], step: int, ranks: Ranks) -> dict[str, Block]:
    """The block of each tensor that the digest of `step` reads, on every rank; all must ask."""
    parts = [_own_part(tensor, step, ranks) for tensor in tensors.values()]
    # Each element is on one rank and 0 on the others, and float32 holds every trained type exactly.
    summed = ranks.add(torch.cat([part.float() for part in parts])) if parts else torch.empty(0)
    blocks = torch.split(summed, [part.numel() for part in parts])
    return {
        name: Block(block.to(tensor.dtype), tuple(tensor.shape))
        for (name, tensor), block in zip(tensors.items(), blocks, strict=True)
    }


def _own_part(tensor: Tensor, step: int, ranks: Ranks) -> Tensor:
    """The block with 0 where another rank has it."""
    from torch.distributed.tensor import DTensor  # takes 0.5 s, and a run without ranks has none

    start, stop = block_bounds(tensor.numel(), step)
    here, offset = tensor.detach(), 0
    if isinstance(here, DTensor):
        mesh = here.device_mesh
        piece, rows = here.to_local(), -(-here.shape[0] // mesh.size(mesh.ndim - 1))
        first = min(mesh.get_local_rank(mesh.ndim - 1) * rows, here.shape[0])
        if piece.shape[0] != min(rows, here.shape[0] - first):
            raise ValueError(f"a weight of {tuple(tensor.shape)} is not cut evenly over ranks")
        if mesh.ndim > 1 and mesh.get_local_rank(0) > 0:
            piece = piece.new_empty(0)  # the first copy has it as well
        here, offset = piece, first * (tensor.numel() // tensor.shape[0])
    elif ranks.rank > 0:
        here = here.new_empty(0)  # rank 0 has all of it as well
    flat = here.reshape(-1).cpu()
    part = flat.new_zeros(stop - start)
    low, high = max(start, offset), min(stop, offset + flat.numel())
    if low < high:
        part[low - start : high - start] = flat[low - offset : high - offset]
    return part
