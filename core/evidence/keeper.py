"""Keeps the evidence of steps within a size: of all while they fit, then of ever fewer.

Writing is done by one thread beside the training; what goes wrong is raised at the next step.
"""

from __future__ import annotations

import math
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from posttrain.core.evidence.step import (
    StepEvidence,
    rows_path,
    steps_in,
    tensors_path,
    write_step,
)


class EvidenceKeeper:
    """Writes steps to `folder`; `keep_through` is the last step that a resumed stage has behind it.

    When more than `max_bytes` are there, steps 1, 1 + n, 1 + 2n ... stay, with n doubled until they
    fit, and the newest. The first step and the newest always stay.
    """

    def __init__(self, folder: Path, max_bytes: float, keep_through: int = 0) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self._sizes: dict[int, int] = {}
        for step in steps_in(folder):
            if step > keep_through:
                self._remove(step)
            else:
                self._sizes[step] = _size(folder, step)
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
        tensors_path(self.folder, step).unlink(missing_ok=True)
        rows_path(self.folder, step).unlink(missing_ok=True)
        self._sizes.pop(step, None)


def _size(folder: Path, step: int) -> int:
    paths = (tensors_path(folder, step), rows_path(folder, step))
    return sum(path.stat().st_size for path in paths if path.is_file())
