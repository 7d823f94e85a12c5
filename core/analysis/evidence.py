"""The evidence of steps: everything a step's loss read, with the texts, kept within a size.

Two files a step in the stage's folder `evidence/`: `step-000003.safetensors` has the columns of the
batch, `step-000003.parquet` a row for each response with its texts and scores. The first is written
last, so that a step is either complete or absent.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from posttrain.core.analysis.report import listed
from posttrain.core.batch import COLUMN_AXES, RolloutBatch
from posttrain.core.data.problems import problem_from_json, problem_to_json
from posttrain.core.errors import ResourceError, RunError
from posttrain.core.types import Problem, RewardSample, Score, StepVerdict, Verdict

FOLDER = "evidence"
"""Of the evidence in a stage's artifact, and among its checkpoints while it runs."""
SCHEMA = 1
_OWN = ("seen_logprobs", "seen_entropy", "seen_by")
_IF_DISTILLED = ("seen_divergence", "seen_slope", "seen_gap")
_GIVEN = "given/"
"""Of the names of `StepEvidence.given` among a step's tensors."""


@dataclass(frozen=True, slots=True)
class StepEvidence:
    """One step of a stage. B responses, T padded response width.

    `batch` is as the update left it: advantages, rewards, old and reference log-probs. The policy's
    own log-probs and entropy (nats) are `seen_logprobs` and `seen_entropy` [B, T], those that the
    last optimizer step on each row was computed from; `seen_by` [B] is that optimizer step's number
    on the batch, from 0, and -1 with NaN for a row that none read. `token_texts` has the text of
    each token id that occurs, `component_names` the names of the batch's reward components.
    `seen_divergence` and `seen_slope` [B, T] are the values of the distillation loss, if there is
    one, and the norms of their d loss / d logits, both before the aggregator, at that step;
    `seen_gap` the teacher's log-prob minus the policy's, where it read the teacher's logits.

    Of stages that learn from given answers, `given` has what else their loss reads (see
    `core.training.readings`).
    """

    step: int
    batch: RolloutBatch
    seen_logprobs: Tensor
    seen_entropy: Tensor
    seen_by: Tensor
    kl_coef: float = 0.0
    component_names: tuple[str, ...] = ()
    token_texts: Mapping[int, str] | None = None
    seen_divergence: Tensor | None = None
    seen_slope: Tensor | None = None
    seen_gap: Tensor | None = None
    given: Mapping[str, Tensor] = field(default_factory=dict)

    def token_text(self, token: int) -> str:
        """The text of a token id, or the id in angle brackets."""
        return (self.token_texts or {}).get(token, f"<{token}>")


def tensors_path(folder: Path, step: int) -> Path:
    """The file whose presence says that the step's evidence is complete."""
    return folder / f"step-{step:06d}.safetensors"


def rows_path(folder: Path, step: int) -> Path:
    """The file with the texts."""
    return folder / f"step-{step:06d}.parquet"


def step_files(folder: Path, step: int) -> tuple[Path, Path]:
    """Both files of a step."""
    return tensors_path(folder, step), rows_path(folder, step)


def steps_in(folder: Path) -> list[int]:
    """Steps that `folder` has evidence of, in order."""
    return steps_named(folder.glob("step-*.safetensors"))


def steps_named(files: Iterable[Path]) -> list[int]:
    """The steps whose tensors are among these files, in order."""
    numbers = (path.stem.removeprefix("step-") for path in files if path.suffix == ".safetensors")
    return sorted(int(number) for number in numbers if number.isdecimal())


def write_step(folder: Path, evidence: StepEvidence) -> int:
    """Write a step's two files; returns their size in bytes. Raises `ResourceError`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    batch = evidence.batch
    tensors = {name: batch.column(name).detach().cpu().contiguous() for name in batch.columns()}
    seen = {name: getattr(evidence, name) for name in (*_OWN, *_IF_DISTILLED)}
    seen |= {f"{_GIVEN}{name}": tensor for name, tensor in evidence.given.items()}
    tensors |= {n: t.detach().cpu().contiguous() for n, t in seen.items() if t is not None}
    header = {
        "schema": SCHEMA,
        "step": evidence.step,
        "kl_coef": evidence.kl_coef,
        "component_names": list(evidence.component_names),
        "token_texts": {str(k): v for k, v in (evidence.token_texts or {}).items()},
    }
    rows = pa.Table.from_pylist([_row(batch, index) for index in range(len(batch))])
    rows = rows.replace_schema_metadata({"posttrain": json.dumps(header)})
    tensors_file, rows_file = step_files(folder, evidence.step)
    partial = folder / f"step-{evidence.step:06d}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(rows, partial, compression="zstd")
        os.replace(partial, rows_file)
        # Two names may share memory (a row's mask and its response mask): written as two.
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, partial)
        os.replace(partial, tensors_file)
        return tensors_file.stat().st_size + rows_file.stat().st_size
    except (OSError, SafetensorError) as error:
        raise ResourceError(
            f"cannot keep the evidence of step {evidence.step} in {folder}: {error}; free some "
            "space, choose another --home, or set keep.evidence_mb: 0"
        ) from error


def read_step(folder: Path, step: int) -> StepEvidence:
    """The evidence of a step; raises `RunError` when there is none or it is damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    known = steps_in(folder)
    if step not in known:
        some = f"it has steps {listed(known)}" if known else "it has none of any step"
        raise RunError(
            f"{folder} has no evidence of step {step}: {some}; keep.evidence_mb bounds how many "
            "steps are kept"
        )
    try:
        with safe_open(tensors_path(folder, step), framework="pt") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        table = pq.read_table(rows_path(folder, step))
        header = json.loads((table.schema.metadata or {})[b"posttrain"])
        return _evidence(header, tensors, table.to_pylist())
    except (
        OSError, SafetensorError, pa.ArrowException, LookupError, TypeError, ValueError,
        AttributeError, RecursionError,
    ) as error:  # fmt: skip
        raise RunError(
            f"the evidence of step {step} in {folder} cannot be read ({error}): it was changed "
            "after the run, or is of another version; compute the stage again with --no-cache"
        ) from error


def _row(batch: RolloutBatch, index: int) -> dict[str, str]:
    """Texts of one response, as JSON where they are more than text."""
    sample = batch.samples[index] if batch.samples else None
    problem = batch.problems[index] if batch.problems else None
    scores = batch.scores[index] if batch.scores else ()
    return {
        "problem": "" if problem is None else json.dumps(problem_to_json(problem)),
        "text": batch.texts[index] if batch.texts else "",
        "transcript": batch.transcripts[index] if batch.transcripts else "",
        "turns": json.dumps(batch.turns[index] if batch.turns else ()),
        "sample": "" if sample is None else json.dumps(_sample_to_json(sample)),
        "scores": json.dumps([asdict(score) for score in scores]),
    }


def _evidence(
    header: Mapping[str, Any],  # Any: JSON
    tensors: Mapping[str, Tensor],
    rows: list[dict[str, str]],
) -> StepEvidence:
    if header["schema"] != SCHEMA:
        raise ValueError(f"schema {header['schema']}, expected {SCHEMA}")
    if len(rows) != len(tensors["response_ids"]):
        raise ValueError(f"{len(rows)} texts for {len(tensors['response_ids'])} responses")
    columns: dict[str, Any] = {n: t for n, t in tensors.items() if n in COLUMN_AXES}
    batch = RolloutBatch(
        **columns,
        problems=tuple(
            problem_from_json(json.loads(row["problem"])) for row in rows if row["problem"]
        ),
        texts=tuple(row["text"] for row in rows),
        transcripts=_if_any(tuple(row["transcript"] for row in rows)),
        turns=_if_any(tuple(tuple(json.loads(row["turns"])) for row in rows)),
        samples=tuple(_sample(json.loads(row["sample"])) for row in rows if row["sample"]),
        scores=_if_any(tuple(tuple(map(_score, json.loads(row["scores"]))) for row in rows)),
    )
    batch.validate()
    return StepEvidence(
        step=header["step"],
        batch=batch,
        **{name: tensors[name] for name in _OWN},
        **{name: tensors[name] for name in _IF_DISTILLED if name in tensors},
        kl_coef=header["kl_coef"],
        component_names=tuple(header["component_names"]),
        token_texts={int(k): v for k, v in header["token_texts"].items()},
        given={n.removeprefix(_GIVEN): t for n, t in tensors.items() if n.startswith(_GIVEN)},
    )


def _if_any(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Empty where every row is empty: the column was not filled."""
    return values if any(values) else ()


def _sample_to_json(sample: RewardSample) -> dict[str, Any]:  # Any: JSON
    # The problem by itself: a mapping in it need not be a dict, and its fields have defaults.
    rest = asdict(replace(sample, problem=Problem("", "", "", "")))
    return rest | {"problem": problem_to_json(sample.problem)}


def _sample(row: Mapping[str, Any]) -> RewardSample:
    return RewardSample(
        **{
            **row,
            "problem": problem_from_json(row["problem"]),
            "prompt_ids": tuple(row["prompt_ids"]),
            "response_ids": tuple(row["response_ids"]),
            "token_ids": tuple(row.get("token_ids", ())),
            "verdict": Verdict(**row["verdict"]),
            "steps": tuple(StepVerdict(**step) for step in row["steps"]),
            "turns": tuple(row["turns"]),
        }
    )


def _score(row: Mapping[str, Any]) -> Score:
    return Score(**{**row, "steps": tuple(StepVerdict(**step) for step in row["steps"])})


class EvidenceKeeper:
    """Writes steps to `folder`, from one thread next to the training.

    `keep_through` is the last step that a resumed stage has behind it. When more than `max_bytes`
    are there, steps 1, 1 + n, 1 + 2n ... stay, with n doubled until they fit, and the newest. The
    first step and the newest always stay.
    """

    def __init__(self, folder: Path, max_bytes: float, keep_through: int = 0) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self._sizes: dict[int, int] = {}
        for step in steps_in(folder):
            if step > keep_through:
                self._remove(step)
            else:
                files = (path for path in step_files(folder, step) if path.is_file())
                self._sizes[step] = sum(path.stat().st_size for path in files)
        self._stride = math.gcd(*(step - 1 for step in self._sizes)) or 1
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="evidence")
        self._pending: Future[None] | None = None

    def put(self, evidence: StepEvidence) -> None:
        """Keep a step; waits for the one before, and raises `ResourceError` if that failed."""
        self.flush()
        self._pending = self._writer.submit(self._write, evidence)

    def flush(self) -> None:
        """Wait until everything is written; raises `ResourceError` if it could not be."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Write what is pending, and end the thread; may be called twice."""
        try:
            self.flush()
        finally:
            self._writer.shutdown()

    def _write(self, evidence: StepEvidence) -> None:
        before = max(self._sizes, default=0)
        self._sizes[evidence.step] = write_step(self.folder, evidence)
        if not self._is_due(before):  # it was the newest until now
            self._remove(before)
        newest = evidence.step
        while sum(self._sizes.values()) > self.max_bytes and len(self._sizes) > 2:
            self._stride *= 2
            for step in [s for s in self._sizes if not self._is_due(s) and s != newest]:
                self._remove(step)

    def _is_due(self, step: int) -> bool:
        return (step - 1) % self._stride == 0

    def _remove(self, step: int) -> None:
        for path in step_files(
            self.folder, step
        ):  # without its tensors, the first, a step is absent
            path.unlink(missing_ok=True)
        self._sizes.pop(step, None)
