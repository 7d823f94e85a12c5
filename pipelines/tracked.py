"""What the policy answers to the same held-out prompts as a stage goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from posttrain.core.errors import ResourceError
from posttrain.core.evaluation import EvaluatedProblem

FILE = "tracked.json"
"""Among the checkpoints of the stage: a stage that goes on shows its earlier answers too."""
PROMPTS, LENGTH = 12, 2000
"""How many prompts are followed, and characters of an answer that are shown."""


def tracked_rows(
    folder: Path, step: int, evaluated: Sequence[EvaluatedProblem]
) -> list[dict[str, object]]:
    """A row per prompt: prompt, answer, and the response at each step evaluated so far.

    A right response begins with "✓", another with "✗". Of evaluations at this step or later, from
    before an interruption, nothing is kept. Raises `ResourceError` where the file cannot be kept.
    """
    path, shown = folder / FILE, evaluated[:PROMPTS]
    known: dict[str, list[str]] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    answers = {k: v for k, v in known.items() if int(k) < step and len(v) == len(shown)}
    answers[str(step)] = [
        f"{'✓' if row.greedy_correct >= 1 else '✗'} {row.greedy_text[:LENGTH]}" for row in shown
    ]
    _write(path, json.dumps(answers, ensure_ascii=False))
    rows: list[dict[str, object]] = []
    for index, row in enumerate(shown):
        over_time = {f"step {at}": texts[index] for at, texts in answers.items()}
        rows.append({"prompt": row.problem.prompt, "answer": row.problem.answer, **over_time})
    return rows


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, "utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise ResourceError(f"the answers to held-out prompts cannot be kept: {error}") from error
