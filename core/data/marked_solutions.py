"""Pairs of a right and a wrong answer, from answers that somebody has marked.

The form is that of GSM8K's example_model_solutions.jsonl: `question`, and for each model a field
`{"is_correct": true, "solution": ...}`. Importing this module needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from posttrain.core.data.json_lines import JsonRow
from posttrain.core.data.preference_rows import PreferenceRow
from posttrain.core.errors import DataError
from posttrain.core.math.splits import text_key

EXAMPLE = '{"question": ..., "<model>": {"is_correct": true, "solution": ...}}'


class MarkedSolution(NamedTuple):
    """One model's solution to a question and what it was marked."""

    model: str
    solution: str
    correct: bool


def solutions_of(row: JsonRow) -> tuple[str, list[MarkedSolution]]:
    """The question of a line and its marked solutions; raises `DataError` for another form."""
    question = row.values.get("question")
    found = [
        MarkedSolution(model, value["solution"], value["is_correct"])
        for model, value in row.values.items()
        if isinstance(value, dict)
        and isinstance(value.get("solution"), str)
        and isinstance(value.get("is_correct"), bool)
    ]
    if not isinstance(question, str) or not question.strip() or not found:
        raise DataError(
            f"{row.where} has the fields {sorted(row.values)}, expected {EXAMPLE}: correct this "
            "line or give another file"
        )
    return question.strip(), found


def marked_pairs(
    rows: Sequence[JsonRow],
    template: str,
    held_out: Collection[str],
    per_question: int,
    restyle: Callable[[str], str],
) -> list[PreferenceRow]:
    """At most `per_question` pairs of each question whose key is not in `held_out`.

    A pair is a right solution and a wrong one, each through `restyle`; each solution is used as
    evenly as possible. `template` holds {question}. Raises `DataError` when no pair is left.
    """
    pairs: list[PreferenceRow] = []
    skipped = 0
    for row in rows:
        question, solutions = solutions_of(row)
        if text_key(question) in held_out:
            skipped += 1
            continue
        right = list(dict.fromkeys(restyle(s.solution) for s in solutions if s.correct))
        wrong = list(dict.fromkeys(restyle(s.solution) for s in solutions if not s.correct))
        prompt = ({"role": "user", "content": template.replace("{question}", question)},)
        for chosen, rejected in _diagonal(right, wrong, per_question):
            pairs.append(PreferenceRow(row.where, prompt, (chosen, rejected)))
    if not pairs:
        raise DataError(
            f"{rows[0].where.rpartition(':')[0]} gives no pair of a right and a wrong solution: "
            f"{skipped} of its {len(rows)} questions are held out; hold out fewer, or give "
            "another file"
        )
    return pairs


def _diagonal(right: list[str], wrong: list[str], count: int) -> Iterator[tuple[str, str]]:
    """Up to `count` different (right, wrong) combinations, no solution again before its turn."""
    combinations = [
        (right[i], wrong[(i + shift) % len(wrong)])
        for shift in range(len(wrong))
        for i in range(len(right))
    ]
    yield from combinations[:count]
