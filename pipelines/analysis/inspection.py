"""`inspect`: the steps that have evidence, or one of them under the token microscope."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from posttrain.core.analysis.answer_weights import answer_columns
from posttrain.core.analysis.evidence import StepEvidence, read_step
from posttrain.core.analysis.microscope import OWN_NAME, samples, top_tokens
from posttrain.core.analysis.report import Cell, Report, shortened, table
from posttrain.core.analysis.what_if import WhatIf
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.math.masking import masked
from posttrain.pipelines.analysis.past_run import PastRun, read_unchanged, require_logprobs
from posttrain.pipelines.stages.microscope import microscope_of

SAMPLES, TOKENS, TEXT = 16, 10, 36
HIDDEN = {"reward_status", "reward_detail", "policy_version"}
"""Columns of a sample that are on the page and in the JSON, but not in the table."""
OF_BOUNDS = {"clipped", "clip"}
"""The same of steps on given answers, whose losses have no bounds."""


def list_steps(run: PastRun, stage: str | None) -> Report:
    """The steps that have evidence, with their figures."""
    found = run.evidence(stage, given_too=True)
    rows = [{"step": step} | _figures(read_step(found.folder, step)) for step in found.steps]
    return Report(
        f"run {run.record.run_id[:8]} · stage {found.stage}",
        ["look at one step with --step"],
        [table(f"Steps of stage {found.stage} that have evidence", rows)],
        {"run_id": run.record.run_id, "stage": found.stage, "steps": rows},
    )


def inspect_step(run: PastRun, stage: str | None, step: int, asked: Sequence[WhatIf]) -> Report:
    """One step under its own loss, under `asked` and the usual ones; its page is the microscope.

    Raises `ConfigError` for a step without evidence or a what-if that cannot be built.
    """
    found = run.evidence(stage, given_too=True)
    evidence = read_unchanged(found, step)
    if isinstance(run.resolved.config.stages[found.stage], RlStage):
        require_logprobs(evidence)
    title = f"run {run.record.run_id[:8]} · stage {found.stage} · step {step}"
    there = run.stage_inputs(found.stage, run.resolved, {})
    seen = microscope_of(there, evidence, title, asked)
    own, notes = seen.weights[OWN_NAME], seen.meta["notes"]
    rows = samples(evidence, own, SAMPLES, seen.answers)
    tokens = top_tokens(evidence, own, TOKENS)
    variants = [
        {name: sum(value) if isinstance(value, list) else value for name, value in row.items()}
        for row in seen.meta["variants"]
    ]
    more = len(evidence.batch) - len(rows)
    quoted = [row | {"text": json.dumps(row["text"], ensure_ascii=False)} for row in tokens]
    hidden = HIDDEN if seen.answers is None else OF_BOUNDS

    def cells(rows: Sequence[Mapping[str, object]]) -> list[dict[str, Cell]]:
        return [{k: _cell(v) for k, v in row.items() if k not in hidden} for row in rows]

    return Report(
        title,
        notes,
        [
            table(
                ("Samples" if seen.answers is None else "Answers")
                + (f" ({more} more on the page)" if more else ""),
                cells(rows),
            ),
            table("Tokens of largest |weight|", cells(quoted)),
            table("The loss, and others on the same tokens", cells(variants)),
        ],
        {"run_id": run.record.run_id, "stage": found.stage, "step": step, "notes": notes}
        | {"samples": rows, "top_tokens": tokens, "variants": variants},
        page=seen.page(),
    )


def _cell(value: object) -> Cell:
    """A value for a narrow column."""
    return shortened(value, TEXT) if isinstance(value, str) else value  # type: ignore[return-value]


def _figures(evidence: StepEvidence) -> dict[str, Cell]:
    """Means over responses, and over tokens with loss in nats."""
    batch, mask = evidence.batch, evidence.batch.mask.bool()
    found: dict[str, Cell] = {"responses": len(batch), "tokens": int(mask.sum())}
    for name, column in (("reward", batch.rewards), ("correct", batch.acc)):
        known = None if column is None else column[column.isfinite()]
        if known is not None and known.numel():
            found[name] = float(known.double().mean())
    if batch.old_logprobs is None:
        return found | _figures_of_answers(evidence)
    found["truncated"] = float(batch.truncated.double().mean())
    read = mask & (evidence.seen_by >= 0)[:, None]
    if read.any():
        gap = masked(evidence.seen_logprobs - batch.column("old_logprobs"), read).clamp(-20, 20)
        count = float(read.sum())
        found["entropy"] = float(masked(evidence.seen_entropy, read).double().sum()) / count
        found["kl_old"] = float((gap.expm1() - gap).double().sum()) / count
    return found


def _figures_of_answers(evidence: StepEvidence) -> dict[str, Cell]:
    """Means over tokens with loss: negative log-prob and entropy in nats, or scores."""
    columns = answer_columns(evidence)
    known = {name: values[values.isfinite()].double() for name, values in columns.items()}
    means = {name: float(values.mean()) for name, values in known.items() if values.numel()}
    return {"nll" if n == "logprobs" else n: -v if n == "logprobs" else v for n, v in means.items()}
