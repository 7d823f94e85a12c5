"""The evidence that a gate shows: accuracies, their paired difference, and answers, in Markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from posttrain.core.analysis.statistics import (
    Comparison,
    Outcome,
    compare,
    read_outcomes,
    same_problems,
)

MAX_TEXT = 400
"""Characters of one answer that are shown."""


def evidence(
    question: str, model_digest: str, evaluation: Path, baseline: Path | None, samples: int
) -> tuple[str, Comparison | None]:
    """The page, and the paired difference where there is a baseline of the same problems."""
    after = read_outcomes(evaluation)
    before = None if baseline is None else read_outcomes(baseline)
    lines = [question, "", f"Model sha256 `{model_digest[:16]}`.", ""]
    lines += ["| evaluation | greedy accuracy | 95 % interval | problems |", "|---|---|---|---|"]
    lines += [_row("this model", evaluation)]
    lines += [] if baseline is None else [_row("baseline", baseline)]
    paired = before is not None and same_problems(before, after)
    compared = compare(before or [], after) if paired else None
    if compared is not None:
        lines += ["", f"Difference, problem by problem: {compared.describe()}."]
    elif before is not None:
        lines += ["", "The baseline was measured on other problems: no paired difference."]
    if samples:
        lines += ["", "## Samples", ""]
        shown = before if paired else None
        for index in chosen(shown, after, samples):
            lines += _sample(None if shown is None else shown[index], after[index])
    return "\n".join(lines) + "\n", compared


def chosen(before: Sequence[Outcome] | None, after: Sequence[Outcome], count: int) -> list[int]:
    """The problems to show: lost and gained ones in turn, then wrong and right ones in turn."""
    places = range(len(after))
    lost, gained = [], []
    if before is not None:
        lost = [i for i in places if before[i].right > after[i].right]
        gained = [i for i in places if before[i].right < after[i].right]
    moved = {*lost, *gained}
    wrong = [i for i in places if i not in moved and not after[i].right]
    right = [i for i in places if i not in moved and after[i].right]
    return [*_in_turn(lost, gained), *_in_turn(wrong, right)][:count]


def _in_turn(first: Sequence[int], second: Sequence[int]) -> list[int]:
    both = min(len(first), len(second))
    mixed = [i for pair in zip(first, second, strict=False) for i in pair]
    return [*mixed, *first[both:], *second[both:]]


def _row(name: str, folder: Path) -> str:
    metrics = json.loads((folder / "metrics.json").read_text())
    rate, low, high = (100 * metrics[f"eval/greedy_{k}"] for k in ("accuracy", "low", "high"))
    total = metrics["eval/num_problems"]
    return f"| {name} | {rate:.1f} % | {low:.1f} to {high:.1f} % | {total:.0f} |"


def _sample(before: Outcome | None, after: Outcome) -> list[str]:
    lines = [f"- **{_line(after.prompt)}** (answer: {_line(after.answer)})"]
    if before is not None:
        lines.append(f"  - before, {_verdict(before)}: {_line(before.text)}")
    lines.append(f"  - now, {_verdict(after)}: {_line(after.text)}")
    return lines


def _verdict(outcome: Outcome) -> str:
    return "right" if outcome.right else "wrong"


def _line(text: str) -> str:
    """Model-written text on one line, as code, so that none of it acts as Markdown or HTML."""
    flat = " ".join(text.split())[:MAX_TEXT].replace("`", "'")
    printable = "".join(c if c.isprintable() else "?" for c in flat)
    return f"`{printable}`" if printable else "(nothing)"
