"""Failed samples: counted in metrics, and the error that stops a run with too many of them."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.core.batch import RolloutBatch
from posttrain.core.errors import RunError
from posttrain.core.rewards.checking import is_failure
from posttrain.core.types import Score

_SHOWN = 3
_PROMPT_CHARACTERS = 60
_COUNTED = {"reward/timeouts": "timeout", "reward/crashes": "crashed", "reward/errors": "error"}


def failure_metrics(scores: Sequence[Sequence[Score]], names: Sequence[str]) -> dict[str, float]:
    """Counts of failed scores, all and by status, and each reward's share; `scores` is [B][K]."""
    if not scores:
        return {}
    found = [score for row in scores for score in row]
    metrics = {"reward/failures": float(sum(map(is_failure, found)))}
    for metric, status in _COUNTED.items():
        metrics[metric] = float(sum(score.status == status for score in found))
    for place, name in enumerate(names):
        failures = sum(is_failure(row[place]) for row in scores)
        if failures:
            metrics[f"reward/failed_frac/{name}"] = failures / len(scores)
    return metrics


def check_failure_rate(batch: RolloutBatch, names: Sequence[str], limit: float) -> None:
    """Raise `RunError`, with the first three failures, when too many rows of `batch` have one."""
    failed = [row for row, scores in enumerate(batch.scores) if any(map(is_failure, scores))]
    share = len(failed) / max(1, len(batch.scores))
    if share <= limit:
        return
    lines = [_describe(batch, row, names) for row in failed[:_SHOWN]]
    listed = "".join(f"\n  {number}. {line}" for number, line in enumerate(lines, start=1))
    raise RunError(
        f"rewards failed on {len(failed)} of {len(batch.scores)} responses ({share:.0%}), more "
        f"than reward_pool.max_failure_rate ({limit:.0%}) allows; the first are:{listed}\n"
        "Mend the reward; if its limit is too short, raise reward_pool.timeout_s; if such failures "
        "are to be expected, raise reward_pool.max_failure_rate (failed responses are not trained "
        "on)."
    )


def _describe(batch: RolloutBatch, row: int, names: Sequence[str]) -> str:
    """One failed row: which reward, its status and detail, and the prompt's start."""
    name, score = next(
        (name, score)
        for name, score in zip(names, batch.scores[row], strict=True)
        if is_failure(score)
    )
    prompt = " ".join(batch.problems[row].prompt.split()) if batch.problems else ""
    if len(prompt) > _PROMPT_CHARACTERS:
        prompt = prompt[:_PROMPT_CHARACTERS] + "..."
    return f"reward '{name}': {score.status}: {score.detail or 'no detail'}; prompt {prompt!r}"
